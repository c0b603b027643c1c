"""The models and recorded steps that the figure `bucket_timeline` shows, written into its script.

    python labs/benchmarks/timeline_data.py     # after recorded_steps.py --json …

The figure works without a server, so its numbers are part of its script: one JSON object between
two marked lines of `logic/bucket_timeline.js`. Sizes are bytes, times are microseconds.
Its sources:

- "stack": the recorded steps, with the time of every gradient and message.
- "transformer": the race (`labs/benchmarks/step_time.py`), which timed whole steps: the compute
  time, the time of the first gradient, and the step with several caps. Each is the median of the
  fastest quarter, as on the page on choosing buckets.
- "assumed": the times that this page assumes for the transformer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.launch.scripts import project_root
from labkit.profiling.cost_model import MIB
from labkit.scenarios.toy_steps import small_transformer
from paired_timing import calm

RESULTS = Path("labs/benchmarks/results")
SCRIPT = Path("book/_static/figures/logic/bucket_timeline.js")
RACE = "transformer, 2 ranks, 1gbit"
# By way: its name in the race, and its caps in bytes.
RACED = {"flat": ("Flat", [MIB, 25 * MIB]), "torch's caps": ("torch DDP", [MIB, 25 * MIB])} | {
    f"{cap} MiB": (f"torch DDP, {cap} MiB", [cap * MIB]) for cap in (1, 2, 4, 8, 16)
}
ASSUMED = {"forward": 80_000, "backward": 160_000}  # as on the page on choosing buckets
_OF_A_WAY = ("caps", "ready", "forward", "bytes", "launched", "done")
_BEGIN = "  // Data: written by labs/benchmarks/timeline_data.py.\n"
_END = "  // End of data.\n"


def stored(root: Path) -> dict[str, Any]:
    """The data of the figure, from the results that are stored below `root`."""
    recording = json.loads((root / RESULTS / "recorded_steps.json").read_text())
    cells = json.loads((root / RESULTS / "step_time.json").read_text())["cells"]
    sizes = [one.nbytes for one in reversed(list(small_transformer().model.parameters()))]
    stack = recording["stack"]
    ways = {way: {key: one[key] for key in _OF_A_WAY} for way, one in stack["ways"].items()}
    models = {
        "stack": {**stack, "ways": ways},
        "transformer": {"bytes": sizes, **_raced(cells[RACE]["seconds"])},
        "assumed": {"bytes": sizes, **ASSUMED, "ways": {}},
    }
    return {"link": recording["link"], "models": models}


def _raced(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    us = {name: round(1e6 * calm(taken)) for name, taken in seconds.items()}
    ways = {way: {"caps": caps, "end": us[name]} for way, (name, caps) in RACED.items()}
    return {"forward": us["t1"], "backward": us["compute"] - us["t1"], "ways": ways}


def written(script: str, data: dict[str, Any]) -> str:
    """`script` with `data` between its marked lines.

    Raises ValueError if the script does not have each of these lines once.
    """
    text = json.dumps(data, separators=(",", ":"))
    text = re.sub(r'(?=,"(?:models|stack|transformer|assumed|ways|ready)":)', "\n", text)
    for line in (_BEGIN, _END):
        if script.count(line) != 1:
            raise ValueError(f"the script has {script.count(line)} lines {line!r}; it needs one")
    above, _, rest = script.partition(_BEGIN)
    below = rest.partition(_END)[2]
    return f"{above}{_BEGIN}  const DATA = {text};\n{_END}{below}"


def main() -> None:
    root = project_root()
    script = root / SCRIPT
    script.write_text(written(script.read_text(), stored(root)))
    print(f"{SCRIPT}: {script.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    main()
