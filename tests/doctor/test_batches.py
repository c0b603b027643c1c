"""The walk through a batch finds tensors in a user's objects, and ends early in large ones."""

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader

from ddp_doctor.facts import journal
from ddp_doctor.observe.data import MAX_VALUES, tensors_in
from ddp_doctor.observe.install import install
from ddp_doctor.observe.session import Session
from ddp_doctor.options import Options

ONE, TWO = torch.ones(1), torch.ones(2)


@dataclass
class Pair:
    name: str
    values: Any


def test_tensors_are_found_in_containers_dataclasses_and_dicts_of_ones_own() -> None:
    assert tensors_in([{"a": ONE}, (TWO,)]) == [ONE, TWO]
    assert tensors_in((UserDict(ids=ONE, mask=TWO),)) == [ONE, TWO]
    assert tensors_in((Pair("x", {"views": [ONE]}),)) == [ONE]
    assert tensors_in([torch.nested.nested_tensor([ONE, TWO]), ONE]) == [ONE]
    assert tensors_in((torch.nn.Linear(2, 2), Pair)) == []
    assert len(tensors_in([ONE] * 30, most=16)) == 16


class Counted:
    """Adds to the dict that it is in when someone looks inside."""

    looked = 0

    def __init__(self, holder: dict[Any, Any]) -> None:
        self.holder = holder

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        Counted.looked += 1
        self.holder[object()] = 1
        return {}


def test_a_dict_in_an_object_may_grow_during_the_walk_and_may_be_large() -> None:
    inside: dict[Any, Any] = {}
    inside.update({at: Counted(inside) for at in range(10 * MAX_VALUES)})
    assert tensors_in((Pair("x", inside), Pair("y", [Counted(inside)] * 1000))) == []
    assert 0 < Counted.looked <= MAX_VALUES


def test_a_scaler_with_methods_of_its_own_is_observed(tmp_path: Path) -> None:
    session = Session(Options(), tmp_path)
    patches = install(session)
    try:
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        assert session.recorder.scales == 4.0  # type: ignore[union-attr]
    finally:
        patches.undo()


def test_batches_without_a_tensor_are_written_down_as_seldom_as_rows(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ddp_doctor.observe.data.MAX_ROWS", 5)
    session = Session(Options(), tmp_path)
    patches = install(session)
    try:
        session.open()
        for _ in DataLoader([{"text": "a"}] * 40, collate_fn=lambda rows: rows):  # type: ignore[arg-type]
            pass
    finally:
        patches.undo()
        session.close()
    (page,) = journal.read(tmp_path)
    assert len(page.facts["batch"]) == 5
