"""surveys/trainers on the trainers that the book itself requires."""

import json
import re
import runpy
from pathlib import Path

import pytest
from in_process import run_in_process

from labkit.launch.scripts import ScriptError, project_root


def rows(text: str) -> dict[str, list[str]]:
    """The first table's cells, by trainer, without what is promised."""
    lines = [re.split(r"  +", line) for line in text.split("\n\n")[1].splitlines()]
    return {name: cells for name, _, *cells in lines[2:]}


@pytest.mark.slow
def test_the_right_loops_are_equal_and_the_wrong_ones_are_not():
    names = ["plain", "plain-wrong", "transformers", "transformers-per-rank"]
    ended = run_in_process(
        "surveys/trainers", "--trainers", *names, "--properties", "WxK", "empty-rank"
    )
    assert ended.code == 0, ended.stderr
    assert rows(ended.stdout) == {
        "plain": ["equal", "equal"],
        "plain-wrong": ["1.48 ∠ 0.827", "1/W"],
        "transformers": ["equal", "equal"],
        "transformers-per-rank": ["1.04 ∠ 0.967", "1/W"],
    }
    assert "0.8272: 1 × mean of micro-batch means" in ended.stdout


def test_the_page_prints_the_stored_results(monkeypatch):
    monkeypatch.syspath_prepend(project_root() / "surveys/trainers")
    page = runpy.run_path(str(project_root() / "surveys/trainers/page.py"), run_name="page")
    rows = json.loads(page["STORED"].read_text())
    shown = page["PAGE"].read_text().split(page["START"])[1].split(page["END"])[0]
    assert shown == page["printed"](rows)
    assert [row["trainer"] for row in rows] == list(page["TRAINERS"])


def test_the_page_prints_the_stored_certificates(monkeypatch):
    monkeypatch.syspath_prepend(project_root() / "surveys/trainers")
    lab = runpy.run_path(str(project_root() / "surveys/trainers/certified.py"), run_name="lab")
    shown = lab["PAGE"].read_text().split(lab["START"])[1].split(lab["END"])[0]
    assert shown == lab["printed"]()


def test_a_second_program_confirms_each_cell_that_is_not_equal_or_its_line_was_read(monkeypatch):
    monkeypatch.syspath_prepend(project_root() / "surveys/trainers")
    lab = runpy.run_path(str(project_root() / "surveys/trainers/by_hand.py"), run_name="lab")
    found = lab["stored"]()
    for row in json.loads(lab["RESULTS"].read_text()):
        for name, cell in row["cells"].items():
            key = row["trainer"], name
            assert cell["text"] == "equal" or lab["agrees"](cell, found.get(key)), key


@pytest.mark.parametrize(
    ("texts", "verdict", "said"),
    [
        (["equal", "equal"], "equal", "yes"),
        (["equal", "0.67 ∠ 0.837"], "different", "yes"),
        (["equal", "0.67 ∠ 0.837"], "equal", "**no**"),
        (["equal", "equal"], "scaled", "**no**"),
        (["equal", "equal"], "not judged", "–"),
    ],
)
def test_a_certificate_agrees_only_if_both_say_equal_or_neither(texts, verdict, said, monkeypatch):
    monkeypatch.syspath_prepend(project_root() / "surveys/trainers")
    lab = runpy.run_path(str(project_root() / "surveys/trainers/certified.py"), run_name="lab")
    assert lab["agree"](texts, {"verdict": verdict}) == said


def test_a_certificate_has_the_samples_of_a_step_on_its_ranks_and_in_one_process(monkeypatch):
    monkeypatch.syspath_prepend(project_root() / "surveys/trainers")
    lab = runpy.run_path(str(project_root() / "surveys/trainers/as_script.py"), run_name="lab")
    case = lab["TRAINERS"]["plain"].family.cases["WxK"]
    ranks, one = (lab["several_steps"](case, world) for world in (2, 1))
    assert ranks.windows == one.windows == lab["PASSES"]
    both = list(zip(*map(ranks.batches, range(2)), strict=True))
    assert one.batches(0) == [first + second for first, second in both]
    first_window = ranks.by_rank()[: len(case.samples)]
    assert first_window == [s for rank in range(2) for batch in case.batches(rank) for s in batch]


@pytest.mark.parametrize("hangs", [True, False])
def test_a_cell_that_fails_is_named_and_the_cells_after_it_run(tmp_path, monkeypatch, hangs):
    lab = runpy.run_path(str(project_root() / "surveys/trainers"), run_name="lab")
    job = [("plain", "W"), ("plain", "padding"), ("plain", "order")]
    stems = [lab["stem"](key) for key in job]

    def second_fails(_: str, folder: Path, *words: str, **__: object) -> None:
        for stem in words[::3]:
            if stem == stems[1]:
                if not hangs:
                    (folder / f"{stem}.1.error").write_text("ValueError: no")
                raise ScriptError("", "", None if hangs else 1)
            for rank in range(2):
                (folder / f"{stem}.{rank}.pt").touch()

    monkeypatch.setitem(lab["run_job"].__globals__, "run_script", second_fails)
    failures = lab["run_job"](job, 2, tmp_path)
    assert failures == {job[1]: "hangs" if hangs else "ValueError: no"}
    assert (tmp_path / f"{stems[2]}.1.pt").exists()
