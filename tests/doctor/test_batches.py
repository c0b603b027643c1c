"""The walk through a batch finds tensors in a user's objects, and ends early in large ones."""

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doctor.journals import numbers
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ddp_doctor.facts import journal
from ddp_doctor.facts.containers import VALUES, tensors_in
from ddp_doctor.facts.types import CALLS
from ddp_doctor.observe.install import install
from ddp_doctor.observe.models import Names
from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.observe.session import Session
from ddp_doctor.observe.states import WrapperState
from ddp_doctor.options import Options

ONE, TWO = torch.ones(1), torch.ones(2)


@dataclass
class Pair:
    name: str
    values: Any


class Slotted:
    __slots__ = ("ids", "mask")


def test_tensors_are_found_in_containers_dataclasses_and_dicts_of_ones_own() -> None:
    assert tensors_in([{"a": ONE}, (TWO,)]) == [ONE, TWO]
    assert tensors_in((UserDict(ids=ONE, mask=TWO),)) == [ONE, TWO]
    assert tensors_in((Pair("x", {"views": [ONE]}),)) == [ONE]
    slotted = Slotted()
    slotted.mask = TWO
    assert tensors_in((slotted,)) == [TWO]
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
    inside.update({at: Counted(inside) for at in range(160 * VALUES)})
    assert tensors_in((Pair("x", inside), Pair("y", [Counted(inside)] * 1000))) == []
    assert 0 < Counted.looked <= 16 * VALUES


class Shard(BatchSampler):
    """As accelerate's: every second batch of another sampler."""

    num_processes = 0

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler, self.num_processes = batch_sampler, 2

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batch_sampler, 0, None, 2)


class Synchronized(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Halved(torch.autograd.Function):
    """A linear layer that puts its weight's gradient elsewhere."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """All observers, in this process."""
    session = Session(Options(), tmp_path)
    patches = install(session)
    session.open()
    yield session
    patches.undo()
    session.close()


def test_the_two_names_of_an_observed_collective_are_one_function(session: Session) -> None:
    """As without the doctor: torch compares some of them by identity."""
    for name in CALLS:
        assert getattr(dist, name, None) is getattr(dist.distributed_c10d, name, None) is not None


def test_a_sampler_inside_of_another_is_seen(session: Session, tmp_path: Path) -> None:
    data = list(range(16))
    half = DistributedSampler(data, num_replicas=2, rank=0)  # type: ignore[arg-type]
    for sampler in (BatchSampler(half, 2, False), Shard(BatchSampler(half, 2, False))):
        next(iter(DataLoader(data, batch_sampler=sampler)))  # type: ignore[arg-type]
    (page,) = journal.read(tmp_path)
    assert [one["replicas"] for one in page.facts["loader"]] == [2, 2]


def test_a_gradient_is_local_until_a_hook_of_the_scripts_own_combines_it(session: Session) -> None:
    """A hook that calls nothing, as one that clips, changes what each rank has."""
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight, other], lr=0.1)
    recorder = session.recorder
    assert isinstance(recorder, Recorder)

    def combine(gradient: torch.Tensor) -> torch.Tensor:
        recorder.collective_count = 1
        return 5 * gradient

    weight.register_hook(lambda gradient: 3 * gradient)
    other.register_hook(combine)
    (weight + other).sum().backward()
    for parameter, local, grad in ((weight, 3.0, 3.0), (other, 1.0, 5.0)):
        assert recorder.local[id(parameter)].tolist() == numbers(torch.full((3,), local))
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [grad] * 3
    bare = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [bare]})
    Halved.apply(weight.detach().requires_grad_(), bare).sum().backward()  # a hook gets None
    optimizer.step()
    assert not session.over


def test_only_layers_with_torchs_own_forward_use_a_ranks_own_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), Synchronized(2), nn.InstanceNorm1d(2))
    assert Names().batch_norms([WrapperState(model, model, 0)]) == 1


def test_a_scaler_with_methods_of_its_own_is_observed(session: Session) -> None:
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    assert session.recorder.scales == 4.0  # type: ignore[union-attr]


def test_batches_without_a_tensor_are_written_down_as_seldom_as_rows(
    session: Session, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ddp_doctor.observe.data.MAX_ROWS", 5)
    for _ in DataLoader([{"text": "a"}] * 40, collate_fn=lambda rows: rows):  # type: ignore[arg-type]
        pass
    (page,) = journal.read(tmp_path)
    assert len(page.facts["batch"]) == 5
