"""All-reduce inside nodes and across them: the result, the bits, the bytes on each kind of link."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from all_reduce_cases import Case, cases, check, reduce_all
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.testing.compare import gradients
from miniddp.collectives import Nodes, hierarchical_all_reduce
from miniddp.extras import comm_hooks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

# Nodes and ranks on each.
SHAPES = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (2, 4)]


def on_nodes(rank: int, ranks_per_node: int, todo: list[Case]) -> list[tuple[Tensor, Tensor]]:
    nodes = Nodes.groups(ranks_per_node)
    return reduce_all(rank, todo, partial(hierarchical_all_reduce, nodes=nodes))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]} x {shape[1]}")
# No shrinking: a failing case is one line of the message already, and each try starts ranks.
# The first example that Hypothesis tries is its simplest, the second is drawn at random.
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(todo=st.lists(cases(), min_size=40, max_size=80))
def test_the_result_is_that_of_dist_all_reduce_and_has_the_same_bits_on_every_rank(shape, todo):
    check(todo, run_ranks(on_nodes, shape[0] * shape[1], shape[1], todo))


def test_a_world_that_is_not_made_of_whole_nodes_is_refused_on_every_rank():
    def work():
        for ranks_per_node in (0, 2, 4):
            said = f"3 ranks do not divide evenly into nodes of {ranks_per_node}"
            with pytest.raises(ValueError, match=said):
                Nodes.groups(ranks_per_node)

    run_ranks(work, 3)


# The comm hook -----------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 5)
    )


def batch(rank: int) -> Tensor:
    return torch.randn(6, 20, generator=torch.Generator().manual_seed(100 + rank))


def hooked(rank: int, ranks_per_node: int) -> list[list[Tensor]]:
    """The third step's gradients by the hook under both wrappers, and by torch without a hook."""
    state = comm_hooks.HierarchicalState(ranks_per_node)
    found = []
    for wrap, hook in ((DropIn, True), (DistributedDataParallel, True), (DropIn, False)):
        wrapped = wrap(model(), bucket_cap_mb=0.005)
        if hook:
            wrapped.register_comm_hook(state, comm_hooks.hierarchical_average)
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(batch(rank)).pow(2).mean().backward()
        found.append(gradients(wrapped.module))
    state.close()
    return found


@pytest.mark.parametrize(("count", "size"), [(2, 2), (3, 2), (2, 4)])
def test_the_hook_averages_under_both_wrappers_as_one_process_with_the_full_batch(count, size):
    full = model()
    full(torch.cat([batch(rank) for rank in range(count * size)])).pow(2).mean().backward()
    of_rank = run_ranks(hooked, count * size, size)
    for ours, torchs, without in of_rank:
        compared = zip(gradients(full), ours, torchs, without, of_rank[0][0], strict=True)
        for wanted, mine, under_torchs, plain, of_first in compared:
            assert torch.equal(mine, of_first), "the same bits on every rank"
            assert torch.equal(mine, under_torchs)
            torch.testing.assert_close(mine, wanted)
            torch.testing.assert_close(mine, plain)


def test_what_fails_in_the_hooks_thread_is_raised_by_backward():
    def work(rank):
        for wrap in (DropIn, DistributedDataParallel):
            state = comm_hooks.HierarchicalState(1)
            wrapped = wrap(model())
            wrapped.register_comm_hook(state, comm_hooks.hierarchical_average)
            broken = mock.Mock(side_effect=ValueError("the cable is unplugged"))
            with (
                mock.patch.object(comm_hooks, "hierarchical_all_reduce", broken),
                pytest.raises(Exception, match="the cable is unplugged"),
            ):
                wrapped(batch(rank)).sum().backward()
            state.close()

    run_ranks(work, 2)


def test_a_bucket_that_is_not_on_the_cpu_is_refused():
    bucket = SimpleNamespace(buffer=lambda: torch.empty(3, device="meta"))
    with pytest.raises(NotImplementedError, match="NCCL picks the route itself"):
        comm_hooks.hierarchical_average(SimpleNamespace(), bucket)
