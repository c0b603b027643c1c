"""Torch's neighbors of DDP, on the drop-in: what they do on torch's DDP, to the bit, on every rank.

Each work function is run once with each wrapper in the same ranks, on the same data, which differ
between ranks. Where training is compared, the single process on the full batch is the third party.
"""

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

WRAPPERS = (DistributedDataParallel, DropIn)
STEPS = 4
SAMPLES = 4
Tensors = list[torch.Tensor]


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)
    return nn.Sequential(*layers).double()


def batch(step: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    shape = SAMPLES * world_size
    x, y = (torch.randn(shape, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    return x, y


def share(step: int, rank: int, world_size: int) -> Tensors:
    return [t.chunk(world_size)[rank] for t in batch(step, world_size)]


def train(model: nn.Module, optimizer: Any, rank: int, world_size: int, steps: int = STEPS) -> None:
    for step in range(steps):
        x, y = share(step, rank, world_size)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def parameters(model: nn.Module) -> Tensors:
    return [p.detach().clone() for p in model.parameters()]


def full_batch(optimizer: type, settings: dict[str, float], world_size: int) -> Tensors:
    model = network()
    steps = optimizer(model.parameters(), **settings)
    for step in range(STEPS):
        x, y = batch(step, world_size)
        steps.zero_grad()
        F.mse_loss(model(x), y).backward()
        steps.step()
    return parameters(model)


def assert_the_same(results: list[tuple[Tensors, Tensors]]) -> None:
    """Torch's DDP and the drop-in are bitwise equal on every rank, and the ranks are equal."""
    for torchs, ours in results:
        for t, o, first in zip(torchs, ours, results[0][0], strict=True):
            assert torch.equal(t, o)
            assert torch.equal(o, first)


def assert_close(found: Tensors, truth: Tensors) -> None:
    for f, t in zip(found, truth, strict=True):
        torch.testing.assert_close(f, t, rtol=1e-12, atol=1e-12)


OPTIMIZERS = [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})]


@pytest.mark.parametrize("world_size", [2, 3])
def test_zero_shards_the_optimizer_of_miniddp_as_of_torchs_ddp(world_size):
    def work(rank, world_size):
        def trained(wrap, optimizer, settings, views):
            model = wrap(network(), bucket_cap_mb=0.0005, gradient_as_bucket_view=views)
            zero = ZeroRedundancyOptimizer(model.parameters(), optimizer, **settings)
            train(model, zero, rank, world_size)
            return parameters(model)

        return [
            tuple(trained(wrap, *chosen, views) for wrap in WRAPPERS)
            for chosen in OPTIMIZERS
            for views in (False, True)
        ]

    cases = zip(*run_ranks(work, world_size), strict=True)
    truths = [full_batch(*chosen, world_size) for chosen in OPTIMIZERS for _ in range(2)]
    for truth, results in zip(truths, cases, strict=True):
        assert_the_same(results)
        assert_close(results[0][1], truth)


@pytest.mark.parametrize("world_size", [2, 3])
def test_zero_steps_inside_the_hook_of_miniddp_as_of_torchs_ddp(world_size):
    optimizer, settings = OPTIMIZERS[0]

    def work(rank, world_size):
        def trained(wrap, static_graph, shard_buckets):
            model = wrap(network(), bucket_cap_mb=0.0005, static_graph=static_graph)
            zero = ZeroRedundancyOptimizer(
                model.parameters(), optimizer, overlap_with_ddp=True, **settings
            )
            # The hooks refuse gloo by its name, for a hang that this one, without
            # interleaving, does not meet.
            with mock.patch.object(ddp_zero_hook.dist, "get_backend", return_value="nccl"):
                hook = ddp_zero_hook.hook_with_zero_step(
                    default_hooks.allreduce_hook, model, zero, shard_buckets
                )
            model.register_comm_hook(None, hook)
            # The first steps prepare the schedule and train nothing: a static graph takes three.
            train(model, zero, rank, world_size, 3 if static_graph else 2)
            before = parameters(model)
            train(model, zero, rank, world_size)
            return before, parameters(model)

        return [
            tuple(trained(wrap, static_graph, shard_buckets) for wrap in WRAPPERS)
            for static_graph in (False, True)
            for shard_buckets in (False, True)
        ]

    truth = full_batch(optimizer, settings, world_size)
    for case in zip(*run_ranks(work, world_size), strict=True):
        for _, (before, _) in case:
            assert all(map(torch.equal, before, network().parameters()))
        assert_the_same([(torchs, ours) for (_, torchs), (_, ours) in case])
        assert_close(case[0][1][1], truth)


def counting_group(inner: dist.ProcessGroup) -> Any:
    """A CountingGroup, whose class each rank makes: torch 2.11's cannot be sent to it by value."""

    class CountingGroup(dist.ProcessGroup):
        """A process group in Python: counts the collectives, and lets another group do them."""

        def __init__(self, inner: dist.ProcessGroup) -> None:
            super().__init__(inner.rank(), inner.size())
            self.inner = inner
            self.called: list[str] = []

        def getBackendName(self) -> str:  # noqa: N802 (torch's name)
            return "counting"

        def allreduce(self, tensors, opts=None):
            self.called.append("allreduce")
            return self.inner.allreduce(tensors, opts or dist.AllreduceOptions())

        def broadcast(self, tensors, opts):
            self.called.append("broadcast")
            return self.inner.broadcast(tensors, opts)

        def allgather(self, outputs, inputs, opts=None):
            self.called.append("allgather")
            return self.inner.allgather(outputs, inputs, opts or dist.AllgatherOptions())

    return CountingGroup(inner)


@pytest.mark.parametrize("views", [False, True])
def test_a_process_group_written_in_python_does_every_all_reduce(views):
    def work(rank, world_size):
        found = []
        for wrap in WRAPPERS:
            group = counting_group(dist.group.WORLD)
            model = wrap(
                network(),
                process_group=group,
                bucket_cap_mb=0.0005,
                gradient_as_bucket_view=views,
            )
            started = len(group.called)
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, world_size)
            found.append((parameters(model), group.called[started:].count("allreduce")))
        return found

    results = run_ranks(work, 3)
    assert_the_same([(torchs, ours) for (torchs, _), (ours, _) in results])
    assert_close(results[0][1][0], full_batch(torch.optim.SGD, {"lr": 0.1}, 3))
    for (_, torchs), (_, ours) in results:
        assert ours == torchs > STEPS  # several buckets a step


def test_ranks_of_one_sub_group_average_among_themselves_alone():
    def work(rank, world_size):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        found = []
        for wrap in WRAPPERS:
            model = wrap(network(), process_group=groups[rank % 2])
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, world_size)
            found.append(parameters(model))
        return tuple(found)

    results = run_ranks(work, 4)
    assert_the_same(results[0::2])
    assert_the_same(results[1::2])
    assert not torch.equal(results[0][1][0], results[1][1][0])

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        shares = (share(step, rank, 4) for rank in (0, 2))
        x, y = (torch.cat(parts) for parts in zip(*shares, strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert_close(results[0][1], parameters(model))


def test_checkpoints_of_miniddp_are_those_of_the_bare_module_and_can_be_loaded():
    def work(rank, world_size):
        found = []
        for wrap in WRAPPERS:
            # It takes the wrapper's prefix from the names of what is an instance of this class.
            checkpoint.DDP = wrap
            model = wrap(network())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            train(model, optimizer, rank, world_size)
            of_model = copy.deepcopy(checkpoint.get_model_state_dict(model))
            of_optimizer = copy.deepcopy(checkpoint.get_optimizer_state_dict(model, optimizer))
            at_save = parameters(model)

            fresh = wrap(network())
            resumed = torch.optim.Adam(fresh.parameters(), lr=0.01)
            # Loading renames the entries of what it is given.
            checkpoint.set_model_state_dict(fresh, copy.deepcopy(of_model))
            checkpoint.set_optimizer_state_dict(fresh, resumed, copy.deepcopy(of_optimizer))
            at_load = parameters(fresh)
            train(model, optimizer, rank, world_size)
            train(fresh, resumed, rank, world_size)
            found.append((of_model, of_optimizer, at_save, at_load, model, fresh))
        return [(*rest, parameters(m), parameters(f)) for *rest, m, f in found]

    bare = list(network().state_dict())
    for torchs, ours in run_ranks(work, 2):
        for of_model, of_optimizer, at_save, at_load, continued, resumed in (torchs, ours):
            assert list(of_model) == bare
            assert sorted(of_optimizer["state"]) == sorted(bare)
            assert_the_same([(at_save, at_load), (at_save, at_load)])
            assert_the_same([(continued, resumed)])
        assert_the_same([(torchs[2], ours[2])])
        assert_the_same([(torchs[4], ours[4])])
        for fqn, state in torchs[1]["state"].items():
            for key, value in state.items():
                assert torch.equal(value, ours[1]["state"][fqn][key])


def test_functional_call_over_miniddp_is_functional_call_over_torchs_ddp():
    def work(rank, world_size):
        found = []
        for wrap in WRAPPERS:
            model = wrap(network())
            x, y = share(0, rank, world_size)
            given = {
                name: (p.detach() * 2 + rank).requires_grad_()
                for name, p in model.named_parameters()
            }
            out = torch.func.functional_call(model, given, (x,))
            F.mse_loss(out, y).backward()
            own = [p.grad for p in model.parameters()]
            found.append((out.detach(), [p.grad for p in given.values()], own, list(given)))
        return found

    for rank, (torchs, ours) in enumerate(run_ranks(work, 2)):
        assert torch.equal(torchs[0], ours[0])
        assert_the_same([(torchs[1], ours[1])])
        assert torchs[2] == ours[2] == [None] * 6
        bare = network()
        assert torchs[3] == ours[3] == [f"module.{name}" for name, _ in bare.named_parameters()]
        given = {
            name: (p.detach() * 2 + rank).requires_grad_() for name, p in bare.named_parameters()
        }
        x, y = share(0, rank, 2)
        F.mse_loss(torch.func.functional_call(bare, given, (x,)), y).backward()
        assert_close(ours[1], [p.grad for p in given.values()])


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
def test_join_carries_miniddp_and_zero_together_over_uneven_inputs(divide_by_initial_world_size):
    def work(rank, world_size):
        found = []
        for wrap in WRAPPERS:
            model = wrap(network(), bucket_cap_mb=0.0005)
            zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            with Join([model, zero], divide_by_initial_world_size=divide_by_initial_world_size):
                train(model, zero, rank, world_size, 2 + rank)
            found.append(parameters(model))
        return tuple(found)

    assert_the_same(run_ranks(work, 3))


def test_post_local_sgd_averages_the_parameters_of_miniddp():
    def work(rank, world_size):
        found = []
        for wrap in WRAPPERS:
            model = wrap(network())
            averager = PeriodicModelAverager(period=2, warmup_steps=1)
            optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
            locally = []
            for step in range(STEPS + 1):
                x, y = share(step, rank, world_size)
                with nullcontext() if step == 0 else model.no_sync():
                    loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                locally.append(parameters(model))
            found.append(locally)
        return found

    results = run_ranks(work, 2)
    for torchs, ours in results:
        for t, o in zip(torchs, ours, strict=True):
            assert_the_same([(t, o)])
    equal = [
        torch.equal(results[0][1][step][0], results[1][1][step][0]) for step in range(STEPS + 1)
    ]
    assert equal == [True, True, False, True, False]
