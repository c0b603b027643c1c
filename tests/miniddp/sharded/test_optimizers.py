"""Optimizers on shards: ZeRO-1 and ZeRO-2 against `MiniDDP`, torch's ZeroRedundancyOptimizer, and
one process; Muon against torch.optim.Muon in one process.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from labkit.launch.ranks import run_ranks
from miniddp import MiniDDP
from miniddp.sharded import (
    Zero2,
    Zero2Optimizer,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
)
from miniddp.sharded.muon import newton_schulz
from tests.ddp_models import MODELS, loss_of
from tests.miniddp.beside_torch import beside_ddp, muon, zero
from tests.on_ranks import on_ranks

NAMES = ["mlp", "tied weights", "frozen parameters", "branches", "mixed dtypes", "convolution"]
NAMES += ["batch norm", "dense embedding", "transformer", "recurrent"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_equals_ddps(world_size):
    bound = 0.0 if world_size == 2 else 1e-4  # bfloat16: 8 bits
    for found in run_ranks(beside_ddp, world_size, NAMES, timeout=600, device="cpu"):
        for kind, distances in found.items():
            assert {name: d for name, d in distances.items() if d.largest > bound} == {}, kind


def what_a_rank_holds(rank: int, world_size: int) -> tuple[int, int, float, list[torch.Tensor]]:
    build, draw = MODELS["mlp"]
    torch.manual_seed(7)
    model = Zero2(build(), bucket_cap_mb=0.1)
    optimizer = Zero2Optimizer(model, torch.optim.Adam)
    torch.manual_seed(rank)
    for _ in range(2):  # both are reduced, and shards accumulate
        loss_of(model(draw(4))).backward()
    whole = sum(bucket.buffer.untyped_storage().nbytes() for bucket in model.reducer.buckets)
    held = sum(shard.grad.nbytes for shard in optimizer.shards)
    norm = clip_grad_norm_(optimizer.shards, 1e-3)
    optimizer.step()
    state = sum(value.numel() for s in optimizer.inner.state.values() for value in s.values())
    return whole, held + 4 * state, float(norm), [p.detach() for p in model.parameters()]


def test_a_rank_holds_its_part_of_gradients_and_state_and_clips_by_the_whole_norm():
    results = run_ranks(what_a_rank_holds, 3)
    build, draw = MODELS["mlp"]
    torch.manual_seed(7)
    alone = build()
    for rank in range(3):
        torch.manual_seed(rank)
        for _ in range(2):
            (loss_of(alone(draw(4))) / 3).backward()
    wanted = float(nn.utils.clip_grad_norm_(alone.parameters(), 1e-3))
    rows = sum(-(-len(p) // 3) * p[0].nbytes for p in alone.parameters())
    for whole, held, norm, parameters in results:
        assert whole == 0
        assert held <= 3 * rows + 200  # gradient, first and second moment
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][3], strict=True))


def one_step(kind: str, rank: int, saved: tuple | None) -> tuple[dict, dict]:
    """The model's and the optimizer's whole state after one step, from `saved` on if there is."""
    build, draw = MODELS["frozen parameters"]
    torch.manual_seed(7)
    module = build()
    model, optimizer = zero(kind, module)
    if saved is not None:
        module.load_state_dict(saved[0])
        load_full_optimizer_state_dict(module, optimizer, saved[1])
    torch.manual_seed(rank)
    loss_of(model(draw(4))).backward()
    optimizer.step()
    return module.state_dict(), full_optimizer_state_dict(module, optimizer)


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_what_three_ranks_save_two_ranks_resume_as_ddp_would(kind):
    saved = run_ranks(one_step, 3, kind, None)
    assert str(saved[1]) == str(saved[2]) == str(saved[0])
    wanted = run_ranks(one_step, 2, "ddp", saved[0])[0]
    for model, optimizer in run_ranks(one_step, 2, kind, saved[0]):
        torch.testing.assert_close(model, wanted[0], rtol=0, atol=0)
        torch.testing.assert_close(optimizer["state"], wanted[1]["state"], rtol=0, atol=0)
        assert optimizer["param_groups"] == wanted[1]["param_groups"]


def rows_of(rank: int) -> dict:
    _, optimizer = zero("zero1", MODELS["mlp"].build())
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def test_rows_are_loaded_on_as_many_ranks_only():
    saved = run_ranks(rows_of, 2)

    def work(rank: int, world_size: int) -> None:
        _, optimizer = zero("zero1", MODELS["mlp"].build())
        if world_size == 2:
            optimizer.load_state_dict(saved[rank])
            return
        with pytest.raises(ValueError, match="another number of ranks"):
            optimizer.load_state_dict(saved[rank % 2])
        assert not optimizer.inner.state  # nothing of it has been loaded

    for world_size in (2, 3):
        run_ranks(work, world_size)


def trained_in_two_stages(optimizer_of: Callable[..., Any], rank: int) -> list[torch.Tensor]:
    """First the part above, then also the frozen one, and one that the optimizer gets late."""
    torch.manual_seed(7)
    below, above, late = nn.Linear(12, 6), nn.Linear(6, 6), nn.Linear(6, 2)
    module = nn.Sequential(below.requires_grad_(False), above, late)
    optimizer = optimizer_of([*below.parameters(), *above.parameters()])
    for stage in range(2):
        if stage == 1:
            below.requires_grad_(True)
            optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.2})
        model = MiniDDP(module)
        for step in range(2):
            optimizer.zero_grad()
            torch.manual_seed(100 * step + rank)
            loss_of(model(torch.randn(4, 12))).backward()
            optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


@on_ranks(2)
def test_parameters_that_are_unfrozen_or_added_later_are_updated(rank: int) -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    sgd = partial(torch.optim.SGD, **options)
    ours = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, **options)
    both = (trained_in_two_stages(optimizer, rank) for optimizer in (ours, sgd))
    assert all(map(torch.equal, *both))


# Muon --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_update_is_that_of_torchs_muon_in_one_process_unless_each_shard_is_alone(world_size):
    for found in run_ranks(muon, world_size, ["gather", "owner", "shard"], device="cpu"):
        _, cosine, sent = found.pop("shard")
        assert cosine < 0.98
        assert sent == 0
        for ratio, cosine, sent in found.values():
            assert abs(ratio - 1) < 2e-3  # newton_schulz rounds to bfloat16
            assert cosine > 1 - 1e-5
            assert sent > 0


def test_newton_schulz_brings_singular_values_near_one():
    for shape in ((12, 5), (5, 12)):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(newton_schulz(matrix).float())
        assert 0.3 < values.min() <= values.max() < 1.6
