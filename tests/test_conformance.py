"""surveys/trainers: its page, its data, and the rows that the pinned environment can run.

`make test` imports nothing of the surveys: all of this is `slow`.
"""

import importlib
import json
import re
from typing import Any

import jsonschema
import pytest

from labkit.launch.scripts import project_root

pytestmark = pytest.mark.slow
REFERENCE = project_root() / "book/reference"


def survey(name: str) -> Any:
    return importlib.import_module(f"surveys.trainers.{name}")


def test_the_right_loops_are_equal_and_the_wrong_ones_are_not() -> None:
    names = ["plain", "plain-wrong", "transformers", "transformers-per-rank"]
    found = survey("measure").measure(names, ["WxK", "empty-rank"])
    assert {key: cell.text for key, cell in found.items()} == {
        ("plain", "WxK"): "equal",
        ("plain", "empty-rank"): "equal",
        ("plain-wrong", "WxK"): "1.48 ∠ 0.827",
        ("plain-wrong", "empty-rank"): "1/W",
        ("transformers", "WxK"): "equal",
        ("transformers", "empty-rank"): "equal",
        ("transformers-per-rank", "WxK"): "1.04 ∠ 0.967",
        ("transformers-per-rank", "empty-rank"): "1/W",
    }
    assert "0.8272: 1 × mean of micro-batch means" in found["plain-wrong", "WxK"].detail


def test_a_row_is_repeated_beside_what_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    assert survey("environments").compare(["plain-wrong"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"plain-wrong +W +1\.37 ∠ 0\.867 +1\.37 ∠ 0\.867 +documented", said)


def test_the_page_prints_the_stored_results() -> None:
    page, rows = survey("page"), survey("stored").rows()
    shown = survey("stored").PAGE.read_text().split(page.START)[1].split(page.END)[0]
    assert shown == page.printed(rows)
    assert [page.with_verdicts(row) for row in rows] == rows
    assert [row["trainer"] for row in rows] == list(survey("trainers").TRAINERS)


def test_the_data_have_the_schema_and_each_row_says_what_it_promises() -> None:
    rows = json.loads((REFERENCE / "trainers.json").read_text())
    jsonschema.validate(rows, json.loads((REFERENCE / "trainers.schema.json").read_text()))
    assert survey("promises").entries().keys() == {row["trainer"] for row in rows}
    for row in rows:
        verdicts = {cell["verdict"] for cell in row["cells"].values()}
        assert row["promise"] or not verdicts & {"broken", "kept"}, row["trainer"]


def test_the_page_prints_the_stored_certificates() -> None:
    lab = survey("certified")
    shown = lab.PAGE.read_text().split(lab.START)[1].split(lab.END)[0]
    assert shown == lab.printed()


def test_a_second_program_confirms_each_cell_that_is_not_equal_or_its_line_was_read() -> None:
    stored = survey("stored")
    found = stored.by_hand()
    for row in stored.rows():
        for name, cell in row["cells"].items():
            key = row["trainer"], name
            assert cell["text"] == "equal" or stored.agrees(cell, found.get(key)), key


def test_a_certificate_has_the_samples_of_a_step_on_its_ranks_and_in_one_process() -> None:
    lab = survey("as_script")
    case = survey("trainers").TRAINERS["plain"].family.cases["WxK"]
    ranks, one = (lab.several_steps(case, world) for world in (2, 1))
    assert ranks.windows == one.windows == lab.PASSES
    both = list(zip(*map(ranks.batches, range(2)), strict=True))
    assert one.batches(0) == [first + second for first, second in both]
    first_window = ranks.by_rank()[: len(case.samples)]
    assert first_window == [s for rank in range(2) for batch in case.batches(rank) for s in batch]
