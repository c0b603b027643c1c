"""Local SGD and DiLoCo against DDP, torch's PostLocalSGDOptimizer, and workers in one process."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from labkit.launch.ranks import run_ranks
from miniddp import MiniDDP
from miniddp.extras.local_updates import DiLoCo, LocalSGD

STEPS = 6
OUTER = {"lr": 0.7, "momentum": 0.9}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def on_ranks(rank: int, kind: str, every: int) -> list[Tensor]:
    model = build()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.5 if every > 1 else 0.0)
    if kind == "ddp":
        return train(MiniDDP(model), inner, rank)
    if kind == "torch":
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
        return train(model, PostLocalSGDOptimizer(inner, averager), rank)
    if kind == "local":
        return train(model, LocalSGD(inner, every), rank)
    outer = {"lr": 1.0, "momentum": 0.0} if kind == "plain diloco" else OUTER
    return train(model, DiLoCo(inner, every, **outer), rank)


def workers(kind: str, every: int) -> list[Tensor]:
    """Two workers in one process."""
    models = [build(), build()]
    inner = [SGD(m.parameters(), lr=0.1, momentum=0.5) for m in models]
    common = copy.deepcopy(models[0])
    outer = SGD(common.parameters(), nesterov=True, **OUTER)
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            model(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for start, a, b in zip(*(m.parameters() for m in (common, *models)), strict=True):
                start.grad = (start - a) / 2 + (start - b) / 2
                if kind == "local":
                    start.copy_(a / 2 + b / 2)
            if kind == "diloco":
                outer.step()
            for model in models:
                model.load_state_dict(common.state_dict())
    return [p.detach() for p in models[0].parameters()]


@pytest.mark.parametrize("kind", ["local", "diloco"])
def test_two_ranks_do_what_two_workers_do_in_one_process_bit_for_bit(kind):
    wanted = workers(kind, 3)
    for found in run_ranks(on_ranks, 2, kind, 3):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_local_sgd_is_torchs_post_local_sgd_bit_for_bit():
    for ours, torchs in zip(
        run_ranks(on_ranks, 2, "local", 3), run_ranks(on_ranks, 2, "torch", 3), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("kind", ["local", "plain diloco"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_synchronized_at_every_step_it_is_ddp_up_to_rounding(kind, world_size):
    for ours, ddps in zip(
        run_ranks(on_ranks, world_size, kind, 1),
        run_ranks(on_ranks, world_size, "ddp", 1),
        strict=True,
    ):
        torch.testing.assert_close(ours, ddps, rtol=1e-5, atol=1e-6)


def interrupted(rank: int, kind: str) -> bool:
    """Whether a training that is saved and loaded in the middle of a round ends as another one."""

    def start() -> tuple[nn.Module, Any]:
        model = build()
        inner = SGD(model.parameters(), lr=0.1, momentum=0.5)
        return model, LocalSGD(inner, 4) if kind == "local" else DiLoCo(inner, 4)

    model, optimizer = start()
    train(model, optimizer, rank)  # the sixth step is the second of a round
    resumed, other = start()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pairs = zip(train(model, optimizer, rank), train(resumed, other, rank), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", ["local", "diloco"])
def test_a_training_goes_on_where_it_was_saved(kind):
    assert run_ranks(interrupted, 2, kind) == [True, True]


def test_an_interval_of_no_steps_is_refused():
    def refused() -> str:
        with pytest.raises(ValueError, match="at least 1"):
            LocalSGD(SGD(build().parameters()), every=0)
        return "refused"

    assert run_ranks(refused, 2) == ["refused"] * 2
