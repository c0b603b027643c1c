"""surveys/trainers: its page, its data, and what the pinned environment can run; surveys/programs.

`make test` imports nothing of the surveys: all of this is `slow`.
"""

import importlib
import json
import subprocess
from pathlib import Path
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


PROGRAM = """
import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 1000
dist.init_process_group("gloo")
wandb.init()
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rows = TensorDataset(torch.randn(8 * STEPS, 4))
for (x,) in DataLoader(rows, 4, sampler=DistributedSampler(rows)):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_public_program_is_checked_out_made_small_and_certified(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    author = ["-c", "user.name=A", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "A program"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    sizes = {"train.py": {"STEPS = 1000": "STEPS = 8"}}
    of = {"name": "a program", "repository": "a/b", "commit": "HEAD", "command": "train.py"}
    program = importlib.import_module("surveys.programs.programs").Program(
        **of, sizes=sizes, shims=("wandb.py",)
    )
    row = importlib.import_module("surveys.programs.__main__").measured(program, tmp_path)
    assert (row["verdict"], row["sizes"], row["world"]) == ("equal", ["STEPS = 8"], 2)
