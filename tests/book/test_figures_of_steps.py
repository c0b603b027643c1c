"""A picture of steps shows the order that the paired benchmark measured."""

import json
import re
from itertools import permutations

import nbformat
import pytest

from labkit.launch import project_root
from paired_timing import paired_ratio

ROOT = project_root()
# The name in the figure → the benchmark's name. The figure's buckets have 1 MiB; the benchmark has
# torch's DDP with this cap, and the rung with torch's caps only.
LADDER = {
    "PerParameter": "PerParameter",
    "Flat": "Flat",
    "OverlappedPerParameter": "OverlappedPerParameter",
    "Bucketed": "Bucketed",
    "BucketedOverlapped": "torch DDP, 1 MiB",
    "torch DDP": "torch DDP, 1 MiB",
}
BY_HAND = {"by hand": "PerParameter", "torch DDP": "torch DDP, 1 MiB"}


def milliseconds_printed(chapter: str, heading: str) -> dict[str, float]:
    """The first column of the table that has `heading`."""
    cells = nbformat.read(ROOT / "book" / chapter, as_version=4).cells
    texts = [o.text for c in cells for o in c.get("outputs", []) if "text" in o]
    (table,) = (text for text in texts if heading in text.splitlines()[0])
    return {name: float(ms) for name, ms in re.findall(r"^(\S.*?) {2,}(\d+\.\d) ", table, re.M)}


def faster_in_every_model(name: str, other: str) -> bool:
    """By at least 5 percent: less is the noise of the benchmark."""
    stored = json.loads((ROOT / "labs/benchmarks/results/step_time.json").read_text())["cells"]
    cells = [cell["seconds"] for of, cell in stored.items() if of.endswith("2 ranks, 1gbit")]
    assert len(cells) == 3
    return all(paired_ratio(seconds[name], seconds[other]) < 0.95 for seconds in cells)


@pytest.mark.parametrize(
    ("chapter", "heading", "ways"),
    [
        ("speed/choosing_buckets.ipynb", "in backward", LADDER),
        ("puzzles/by_hand_or_ddp.ipynb", "gradients ready at each launch", BY_HAND),
    ],
)
def test_whoever_is_faster_in_every_model_of_the_benchmark_is_faster_in_the_figure(
    chapter, heading, ways
):
    shown = milliseconds_printed(chapter, heading)
    assert set(shown) == set(ways)
    pairs = [(a, b) for a, b in permutations(ways, 2) if faster_in_every_model(ways[a], ways[b])]
    assert pairs
    assert [(a, b) for a, b in pairs if shown[a] >= shown[b]] == []
