"""Every benchmark runs, in miniature, and its JSON has every cell. No time is judged here."""

import json
import math
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from in_process import run_in_process

from labkit.launch.ranks import run_ranks
from labkit.launch.scripts import project_root
from labkit.profiling.benchmark import (
    BenchmarkModel,
    benchmark_models,
    describe_machine,
    paired_ratio,
)
from labkit.profiling.benchmark_arguments import MODELS

BENCHMARKS = "labs/benchmarks"
CONTENDERS = {
    "PerParameter",
    "Flat",
    "OverlappedPerParameter",
    "Bucketed",
    "BucketedOverlapped",
    "MiniDDP",
    "MiniDDP, views",
    "drop-in",
    "drop-in, views",
    "MiniDDP, planned",
    "torch DDP",
    "torch DDP, views",
    "torch DDP, our plan",
    "compute",
    "C",
    "t1",
}
SINCE_THE_STORED_RACE = {"drop-in", "drop-in, views"}


def figures_of(name: str, folder: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """The JSON and the output of a benchmark in miniature."""
    path = folder / f"{name}.json"
    ended = run_in_process(f"{BENCHMARKS}/{name}.py", "--quick", "--json", path, *arguments)
    assert ended.code == 0, ended.stderr
    figures = json.loads(path.read_text())
    assert set(figures["machine"]) == {"cores", "threads a rank", "torch"}
    assert all(math.isfinite(number) for number in numbers(figures))
    return figures, ended.stdout


def numbers(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict | list):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers(branch)
    elif isinstance(tree, int | float):
        yield tree


SCRIPTS = sorted(path.name for path in (project_root() / BENCHMARKS).glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_the_benchmark_and_how_to_start_it(script):
    ended = run_in_process(f"{BENCHMARKS}/{script}", "--help")
    assert ended.code == 0
    assert f"python {BENCHMARKS}/{script}" in ended.stdout


LINKS = {"loopback": None, "1gbit": 1.0}
CELLS = {f"{m}, {w} ranks, {k}": (m, w, k) for m in MODELS for w in (2, 4) for k in LINKS}
# Every model, and both numbers of ranks on both links.
RACED = [
    "wide MLP, 2 ranks, loopback",
    "600 small tensors, 4 ranks, 1gbit",
    "transformer, 2 ranks, 1gbit",
    "600 small tensors, 4 ranks, loopback",
]


class Race(NamedTuple):
    folder: Path
    after_each_run: list[dict[str, Any]]  # what the file then holds
    printed: str


@pytest.fixture(scope="module")
def race(tmp_path_factory) -> Race:
    """A run of step_time for each cell of `RACED`, all into one file."""
    folder, held, printed = tmp_path_factory.mktemp("race"), [], ""
    for cell in RACED:
        model, ranks, link = CELLS[cell]
        one = ("--model", model, "--ranks", ranks, "--link", link)
        figures, said = figures_of("step_time", folder, *one)
        held.append(figures)
        printed += said
    return Race(folder, held, printed)


def test_by_default_every_model_races_with_both_numbers_of_ranks_on_both_links(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["step_time.py", "--quick"])
    module = runpy.run_path(str(project_root() / BENCHMARKS / "step_time.py"))
    stored = json.loads((project_root() / BENCHMARKS / "results" / "step_time.json").read_text())
    cell = next(iter(stored["cells"].values()))
    started = []

    def run_ranks(_work, ranks, model, gbit_per_s, *_, **__):
        started.append((model.shape, ranks, gbit_per_s))
        return [(cell, {})] * ranks

    monkeypatch.setitem(module["main"].__globals__, "run_ranks", run_ranks)
    module["main"](module["arguments_of_this_benchmark"]())
    titles = re.findall(r"^(.*): \d+ tensors", capsys.readouterr().out, re.M)
    assert sorted(titles) == sorted(CELLS)
    shapes = {name: model.shape for name, model in benchmark_models(True).items()}
    for title, of_title in zip(titles, started, strict=True):
        model, ranks, link = CELLS[title]
        assert of_title == (shapes[model], ranks, LINKS[link])


def test_every_contender_is_timed_in_every_cell_and_the_report_shows_them_all(race, tmp_path):
    cells = race.after_each_run[-1]["cells"]
    assert list(cells) == RACED
    for name, cell in cells.items():
        assert set(cell["seconds"]) >= CONTENDERS
        caps = set(cell["seconds"]) - CONTENDERS
        assert len(caps) >= 3
        assert all(one.startswith("torch DDP, ") and one.endswith(" MiB") for one in caps)
        assert all(len(taken) == 2 and min(taken) > 0 for taken in cell["seconds"].values())
        assert sum(cell["plan"]) > 0
        assert name in race.printed
    drawn = tmp_path / "race.png"
    report = report_on(race.folder, "--figure", drawn)
    assert "600 4 1gbit" in report
    assert "planned ÷ limit, 1 Gbit/s, worst" in report
    assert drawn.stat().st_size > 10_000


def test_the_doctor_is_timed_with_every_model_with_and_without(tmp_path):
    figures, printed = figures_of("doctor_overhead", tmp_path)
    assert len(figures["seconds"]) == 3
    for name, taken in figures["seconds"].items():
        assert name in printed
        assert min(*taken["with"], *taken["without"]) > 0


def test_only_a_few_contenders_race_on_request_and_the_miniddp_of_another_checkout_may():
    wanted = {"Flat", "MiniDDP", "MiniDDP before", "MiniDDP, views", "MiniDDP before, views"}
    one = ("--quick", "--model", "wide MLP", "--ranks", 2, "--link", "loopback", "--copies", 2)
    before = ("--before", project_root() / "src")
    ended = run_in_process(f"{BENCHMARKS}/step_time.py", *one, *before, "--only", *wanted)
    assert ended.code == 0, ended.stderr
    rows = {line.split("  ")[0] for line in ended.stdout.splitlines()}
    assert {"torch DDP", "torch DDP, again"} | wanted <= rows
    assert not {"Bucketed", "MiniDDP, planned", "torch DDP, our plan"} & rows


def test_the_ratio_of_several_copies_comes_with_its_error():
    one = ("--quick", "--model", "wide MLP", "--ranks", 2, "--link", "loopback")
    for copies, form in ((3, r"\d+\.\d{3} ± \d+\.\d{3}"), (1, r"\d+\.\d{3}")):
        some = ("--only", "MiniDDP", "--copies", copies)
        ended = run_in_process(f"{BENCHMARKS}/step_time.py", *one, *some)
        assert ended.code == 0, ended.stderr
        ratio = {
            cells[0]: cells[2]
            for line in ended.stdout.splitlines()
            if len(cells := re.split(r" {2,}", line)) == 4
        }
        assert ratio["torch DDP"] == "1.000"
        assert re.fullmatch(form, ratio["MiniDDP"])
        assert re.fullmatch(form, ratio["torch DDP, again"])


def test_the_error_is_two_standard_errors_of_the_mean():
    module = runpy.run_path(str(project_root() / BENCHMARKS / "step_time.py"))
    # The standard deviation is 0.04, so two standard errors are 2 · 0.04 / √4.
    assert module["mean_and_error"]([0.98, 0.98, 0.98, 1.06]) == "1.000 ± 0.040"


def test_only_refuses_unknown_contenders_and_a_file_of_whole_cells(tmp_path):
    one = ("--quick", "--model", "wide MLP", "--ranks", 2, "--link", "loopback", "--only")
    with pytest.raises(ValueError, match=r"--only names \['Minidp'\]; .*'MiniDDP'"):
        run_in_process(f"{BENCHMARKS}/step_time.py", *one, "Minidp")
    path = tmp_path / "step_time.json"
    ended = run_in_process(f"{BENCHMARKS}/step_time.py", *one, "MiniDDP", "--json", path)
    assert ended.code == 2
    assert "leave out --only, or --json" in ended.stderr
    assert not path.exists()


def test_there_is_at_least_one_copy_of_each_contender():
    ended = run_in_process(f"{BENCHMARKS}/step_time.py", "--quick", "--copies", 0)
    assert ended.code == 2
    assert "argument --copies: 0 is less than 1" in ended.stderr


def test_each_copy_is_another_wrapper_and_a_time_is_the_mean_of_the_copies():
    def work(rank, world_size, device, script):
        race = runpy.run_path(script)["race"]
        really = race.__globals__["take_turns"]
        taken, turns = {}, {}

        def take_turns(steps, *rest):
            *_, blocks = rest
            of_copies = [{name[-1] for name in block} for block in blocks if len(block) > 1]
            assert of_copies == [{"0"}, {"1"}]
            taken.update(steps)
            turns.update(really(steps, *rest))
            return dict(turns)

        race.__globals__["take_turns"] = take_turns
        built = []

        class Recorded(BenchmarkModel):
            def module(self):
                built.append(super().module())
                return built[-1]

        model = Recorded(*benchmark_models(True)["wide MLP"])
        names = ["MiniDDP", "MiniDDP, planned"]
        cell, ratios = race(rank, world_size, device, model, None, 2, 0.0, None, names, 2, seed=0)
        # Each turn's gradients are cleared before the next turn.
        assert all(p.grad is None for module in built for p in module.parameters())
        pairs = [
            (cell["seconds"][name][0], (turns[f"{name} 0"][0] + turns[f"{name} 1"][0]) / 2)
            for name in names
        ]
        for name in names:
            pairs += [
                (ratio, paired_ratio(turns[f"{name} {copy}"], turns[f"torch DDP {copy}"]))
                for copy, ratio in enumerate(ratios[name])
            ]
        copies = [step for name, step in taken.items() if name[-2:] in (" 0", " 1")]
        return len(copies), len({id(step) for step in copies}), pairs

    script = str(project_root() / BENCHMARKS / "step_time.py")
    for copies, different, pairs in run_ranks(work, 2, script):
        assert copies == different == 2 * len(["MiniDDP", "MiniDDP, planned", "torch DDP", "again"])
        for shown, computed in pairs:
            assert shown == pytest.approx(computed, abs=1e-6)


def test_cells_with_another_number_of_copies_do_not_go_into_the_same_file(tmp_path):
    path = tmp_path / "step_time.json"
    stored = {"machine": describe_machine(), "quick": True, "cells": {}}
    path.write_text(json.dumps(stored))
    ended = run_in_process(f"{BENCHMARKS}/step_time.py", "--quick", "--json", path, "--copies", 2)
    assert "with other --quick or --copies" in ended.stderr
    assert json.loads(path.read_text()) == stored


def test_the_stored_race_is_whole_and_the_page_shows_its_report():
    folder = project_root() / BENCHMARKS
    cells = json.loads((folder / "results" / "step_time.json").read_text())["cells"]
    assert set(cells) == set(CELLS)
    for cell in cells.values():
        assert set(cell["seconds"]) >= CONTENDERS - SINCE_THE_STORED_RACE
        rounds = {len(taken) for taken in cell["seconds"].values()}
        assert len(rounds) == 1
        assert rounds.pop() >= 4
    page = (folder / "README.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert shown.count("\n") > 8
    assert shown in report_on()


def test_quick_cells_do_not_go_into_a_file_of_others(race):
    ended = run_in_process(f"{BENCHMARKS}/step_time.py", "--json", race.folder / "step_time.json")
    assert ended.code == 1
    assert "do not go into one file" in ended.stderr


def report_on(*arguments: object) -> str:
    ended = run_in_process(f"{BENCHMARKS}/report.py", *arguments)
    assert ended.code == 0, ended.stderr
    return ended.stdout


def test_a_report_on_nothing_says_what_to_run_first(tmp_path):
    ended = run_in_process(f"{BENCHMARKS}/report.py", tmp_path)
    assert ended.code == 1
    assert "run some of their scripts first" in ended.stderr


def test_every_script_is_in_the_table_of_the_page():
    page = (project_root() / BENCHMARKS / "README.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE)) == SCRIPTS


def test_a_later_run_adds_its_cells_to_those_that_are_there(race):
    for runs, figures in enumerate(race.after_each_run, 1):
        assert list(figures["cells"]) == RACED[:runs]
    cells = [figures["cells"] for figures in race.after_each_run]
    assert all(cell == cells[-1][name] for each in cells for name, cell in each.items())


def test_memory_counts_gradients_and_buckets_of_both_wrappers(tmp_path):
    figures, _ = figures_of("memory", tmp_path)
    wrappers = {"torch DDP": 2, "torch DDP, views": 1, "MiniDDP": 2, "MiniDDP, views": 1}
    assert set(figures["cells"]) == {f"{m}, {w}" for m in MODELS for w in wrappers}
    for name, cell in figures["cells"].items():
        # Counted, not timed: a gradient and its copy, or a view.
        assert cell["steady"] == pytest.approx(wrappers[name.split(", ", 1)[1]], abs=0.02)
    report = report_on(tmp_path)
    assert all(name in report for name in figures["cells"])


def test_overhead_and_construction_time_both_wrappers(tmp_path):
    overhead, _ = figures_of("overhead", tmp_path)
    assert set(overhead["seconds"]) >= {"the module alone", "torch DDP", "MiniDDP", "drop-in"}
    construction, _ = figures_of("construction", tmp_path)
    assert set(construction["cells"]) == set(MODELS)
    for seconds in construction["cells"].values():
        assert set(seconds) == {"torch DDP", "MiniDDP"}
    report = report_on(tmp_path)
    assert "the module alone" in report
    assert "transformer, MiniDDP" in report


def test_ranks_are_started_in_three_ways(tmp_path):
    figures, _ = figures_of("start_ranks", tmp_path)
    assert set(figures["seconds"]) == {"run_ranks", "torch.multiprocessing.spawn", "torchrun"}
    assert all(figures["seconds"].values())
    assert "torch.multiprocessing.spawn" in report_on(tmp_path)


def test_simulated_steps_stand_beside_measured_ones_and_beyond_is_marked_as_simulated(tmp_path):
    figures, printed = figures_of("simulated_steps", tmp_path)
    assert set(figures["collectives"]) == {"gloo", "naive", "ring", "recursive doubling"}
    assert set(figures["cells"]) == {
        f"{m}, 2 ranks, {k}" for m in MODELS for k in ("loopback", "1gbit")
    }
    for cell in figures["cells"].values():
        for step in cell["steps"]:
            error = 100 * (step["simulated"] / step["measured"] - 1)
            assert step["error"] == pytest.approx(error)
    assert max(row["ranks"] for row in figures["simulated"]) >= 1000
    assert "SIMULATED" in printed
    report = report_on(tmp_path)
    assert "SIMULATED" in report
    assert all(cell in report for cell in figures["cells"])


def test_submissions_are_graded_and_timed_by_kind(tmp_path):
    if shutil.which("bwrap") is None:
        pytest.skip("submissions are graded in a sandbox only: install bubblewrap")
    figures, printed = figures_of("grade_many", tmp_path)
    assert {k: len(v) for k, v in figures["seconds"].items()} == {
        "key": 1,
        "empty": 1,
        "wrong answer": 1,
    }
    assert "3 submissions, 2 at a time" in printed
    assert "wrong answer" in report_on(tmp_path)


def test_every_way_is_recorded_and_compared_with_its_simulated_step(tmp_path):
    figures, printed = figures_of("recorded_steps", tmp_path)
    model = figures["stack"]
    assert set(model["ways"]) == {"flat", "torch's caps", "1 MiB", "2 MiB"}
    assert len(model["bytes"]) == len(model["ready"]) == 6
    for way, step in model["ways"].items():
        assert way in printed
        assert step["ready"] == sorted(step["ready"])
        lists = [step[key] for key in ("bytes", "after", "launched", "done")]
        assert len({len(one) for one in lists}) == 1
        assert sum(step["bytes"]) >= sum(model["bytes"])
        assert all(a < b for a, b in zip(step["launched"], step["done"], strict=True))
