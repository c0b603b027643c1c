"""Every benchmark runs, in miniature, and its JSON has every cell. No time is judged here."""

import json
import math
import re
import runpy
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from in_process import run_in_process

from benchmark_options import MODELS
from labkit.launch.ranks import run_ranks
from labkit.launch.scripts import project_root
from paired_timing import take_turns

BENCHMARKS = "labs/benchmarks"
STEP_TIME = f"{BENCHMARKS}/step_time.py"
LADDER = {"PerParameter", "Flat", "OverlappedPerParameter", "Bucketed", "BucketedOverlapped"}
OURS = {"MiniDDP", "MiniDDP, views"}
SINCE_THE_STORED_RACE = {"drop-in", "drop-in, views"}
CONTENDERS = LADDER | OURS | {"torch DDP", "torch DDP, views"}
CONTENDERS |= {"compute", "C", "t1"} | SINCE_THE_STORED_RACE
LINKS = {"loopback": None, "1gbit": 1.0}
CELLS = {f"{m}, {w} ranks, {k}": (m, w, k) for m in MODELS for w in (2, 4) for k in LINKS}
RACED = ["600 small tensors, 4 ranks, 1gbit", "transformer, 2 ranks, loopback"]
ONE_CELL = ("--quick", "--model", "wide MLP", "--ranks", 2, "--link", "loopback")


def results_of(name: str, folder: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """The JSON and the output of a benchmark in miniature."""
    path = folder / f"{name}.json"
    ended = run_in_process(f"{BENCHMARKS}/{name}.py", "--quick", "--json", path, *arguments)
    assert ended.code == 0, ended.stderr
    results = json.loads(path.read_text())
    assert set(results["machine"]) == {"cores", "threads a rank", "torch"}
    assert all(math.isfinite(number) for number in numbers(results))
    return results, ended.stdout


def numbers(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict | list):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers(branch)
    elif isinstance(tree, int | float):
        yield tree


def stored(path: Path) -> str:
    ended = run_in_process(STEP_TIME, "--stored", path)
    assert ended.code == 0, ended.stderr
    return ended.stdout


# 1. Turns that all ranks count alike -----------------------------------------------------------


def test_a_turn_lasts_until_the_slowest_rank_is_done_and_all_ranks_say_the_same():
    def work(rank: int) -> tuple[dict[str, list[float]], list[str]]:
        called: list[str] = []

        def slow_on_rank_1() -> None:
            called.append("slow")
            if rank == 1:
                time.sleep(0.02)

        programs = {"slow": slow_on_rank_1, "fast": lambda: called.append("fast")}
        seconds = take_turns(programs, 3, lambda: called.append("after"))
        assert len(seconds["slow"]) == len(seconds["fast"]) == 3
        assert min(seconds["slow"]) >= 0.02
        assert called[1::2] == ["after"] * 6
        assert sorted(called[::2]) == ["fast"] * 3 + ["slow"] * 3
        return seconds, called

    first, second = run_ranks(work, 2)
    assert first == second


def test_the_programs_of_a_block_run_one_right_after_another_in_changing_orders():
    def work(rank: int) -> list[str]:
        called: list[str] = []
        programs = {name: partial(called.append, name) for name in "abcd"}
        take_turns(programs, 8, lambda: None, blocks=["ab", "cd"])
        return called

    first, second = run_ranks(work, 2)
    assert first == second
    rounds = ["".join(first[i : i + 4]) for i in range(0, 32, 4)]
    assert {"".join(sorted(each[:2])) for each in rounds} == {"ab", "cd"}
    assert {"".join(sorted(each[2:])) for each in rounds} == {"ab", "cd"}
    assert len({each.replace("c", "").replace("d", "") for each in rounds}) == 2


# 2. The race --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_contender_is_timed_in_every_cell_and_what_is_stored_can_be_shown(tmp_path):
    for runs, cell in enumerate(RACED, start=1):
        model, ranks, link = CELLS[cell]
        options = ("--model", model, "--ranks", ranks, "--link", link)
        results, printed = results_of("step_time", tmp_path, *options)
        assert cell in printed
        assert list(results["cells"]) == RACED[:runs], "a later run adds its cells"
    for cell in results["cells"].values():
        assert set(cell["seconds"]) >= CONTENDERS
        caps = set(cell["seconds"]) - CONTENDERS
        assert len(caps) >= 3
        assert all(one.startswith("torch DDP, ") and one.endswith(" MiB") for one in caps)
        assert all(len(taken) == 2 and min(taken) > 0 for taken in cell["seconds"].values())
    assert stored(tmp_path / "step_time.json").endswith(printed), "the last cell, as it was printed"
    ended = run_in_process(STEP_TIME, "--json", tmp_path / "step_time.json")
    assert ended.code == 1
    assert "do not go into one file" in ended.stderr, "quick cells and others"


@pytest.mark.slow
def test_a_few_contenders_race_on_request_and_the_ratio_of_their_copies_has_an_error():
    wanted = {"Flat", "MiniDDP", "MiniDDP before", "MiniDDP, views", "MiniDDP before, views"}
    wanted |= {"fully_shard", "torch fully_shard"}
    before = ("--before", project_root() / "src", "--copies", 2)
    ended = run_in_process(STEP_TIME, *ONE_CELL, *before, "--only", *wanted)
    assert ended.code == 0, ended.stderr
    cells = [re.split(r" {2,}", line) for line in ended.stdout.splitlines()]
    ratios = {row[0]: row[2] for row in cells if len(row) == 5}
    assert set(ratios) >= {"torch DDP", "torch DDP, again"} | wanted
    assert re.search(r"^fully_shard ÷ torch fully_shard: \d\.\d{3}$", ended.stdout, re.M)
    assert "Bucketed" not in ratios
    assert ratios["torch DDP"] == "1.000"
    assert re.fullmatch(r"\d+\.\d{3} ± \d+\.\d{3}", ratios["MiniDDP"])


def test_the_error_is_two_standard_errors_of_the_mean():
    module = runpy.run_path(str(project_root() / STEP_TIME))
    # The standard deviation is 0.04, so two standard errors are 2 · 0.04 / √4.
    assert module["mean_and_error"]([0.98, 0.98, 0.98, 1.06]) == "1.000 ± 0.040"


def test_the_stored_race_is_whole_and_the_page_shows_a_part_of_it_and_every_script():
    folder = project_root() / BENCHMARKS
    cells = json.loads((folder / "results" / "step_time.json").read_text())["cells"]
    assert set(cells) == set(CELLS)
    for cell in cells.values():
        assert set(cell["seconds"]) >= CONTENDERS - SINCE_THE_STORED_RACE
        assert len({len(taken) for taken in cell["seconds"].values()}) == 1
    page = (folder / "README.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert shown.count("\n") >= 5
    assert shown in stored(folder / "results" / "step_time.json")
    scripts = {path.name for path in folder.glob("*.py") if "__main__" in path.read_text()}
    assert set(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE)) == scripts


# 3. The other scripts -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_doctor_is_timed_with_every_model_with_and_without(tmp_path):
    results, printed = results_of("doctor_overhead", tmp_path)
    assert len(results["seconds"]) == 3
    for name, taken in results["seconds"].items():
        assert name in printed
        assert min(*taken["with"], *taken["without"]) > 0


@pytest.mark.slow
def test_every_way_is_recorded_and_compared_with_its_simulated_step(tmp_path):
    results, printed = results_of("recorded_steps", tmp_path)
    model = results["stack"]
    assert set(model["ways"]) == {"flat", "torch's caps", "1 MiB", "2 MiB"}
    assert len(model["bytes"]) == len(model["ready"]) == 6
    for way, step in model["ways"].items():
        assert way in printed
        assert step["ready"] == sorted(step["ready"])
        assert len({len(step[key]) for key in ("bytes", "after", "launched", "done")}) == 1
        assert sum(step["bytes"]) >= sum(model["bytes"])
        assert all(a < b for a, b in zip(step["launched"], step["done"], strict=True))
