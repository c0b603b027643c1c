"""`bucket_plan="measured"`: one plan on all ranks, the right gradients all along, hooks that go."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.launch.ranks import run_ranks
from labkit.profiling.slow_link import SlowLink
from miniddp.buckets import MIB, bucket_caps, sizes_of
from miniddp.extras import comm_hooks
from miniddp.extras.planner import LinkCost, measured_plan
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from miniddp.torch_drop_in import first_steps
from miniddp.torch_drop_in.first_steps import STEPS, TRIAL, measure_link

# Forwards until the plan: one bucket, a step to warm up, the steps on the clock.
SETTLED = STEPS + 3
# Forwards until the fastest of two candidates (the plan, and one bucket) is chosen.
CHOSEN = SETTLED + 2 * (1 + TRIAL)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * rank + step))


def clock(tick: float):
    """A `perf_counter` that is later by `tick` seconds at every call."""
    moments = itertools.count()
    return lambda: tick * next(moments)


def plan_of(wrapped: DropIn) -> list[list[int]]:
    return [bucket.indices for bucket in wrapped.reducer.buckets]


ONE_GBIT = LinkCost(1e-5, 8e-9, 2e-6, 1e-9)


def planned_by_a_clock(rank: int):
    """The plans before each forward, with clocks that differ from rank to rank."""
    wrapped = DropIn(model(), bucket_plan="measured")
    plans = []
    with (
        mock.patch.object(first_steps, "perf_counter", clock(1e-5 * (rank + 1))),
        mock.patch.object(first_steps, "measure_link", return_value=ONE_GBIT),
    ):
        for step in range(SETTLED + 2):
            wrapped(inputs(rank, step)).square().sum().backward()
            plans.append(plan_of(wrapped))
    return plans


def test_after_the_first_steps_all_ranks_take_the_plan_of_the_slowest_ranks_times():
    first, *others = run_ranks(planned_by_a_clock, 3)
    assert all(plans == first for plans in others)
    module = model()
    sizes = sizes_of(module.parameters())
    # Rank 2 ticks every 30 µs: once when the step begins, then at each gradient. Within a layer
    # the bias's comes first.
    order = [index for layer in reversed(range(6)) for index in (2 * layer + 1, 2 * layer)]
    ready = [3e-5 * (1 + order.index(index)) for index in range(12)]
    wanted = measured_plan(sizes, [ready] * STEPS, ONE_GBIT, bucket_caps())
    assert len(wanted) > 1
    assert len(first[0]) == 1
    assert first[SETTLED - 2] != wanted
    assert first[SETTLED - 1 :] == [wanted] * 3


def tried_on_a_link(rank: int, fastest: str):
    """The number of buckets before each forward, on a clock on which one candidate is faster."""
    wrapped = DropIn(model(), bucket_plan="measured")
    buckets, now = [], 0.0

    def clock_of_the_candidate() -> float:
        nonlocal now
        several = len(wrapped.reducer.buckets) > 1
        quick = several == (fastest == "planned")
        # Rank 1 sees the opposite: rank 0 decides.
        now += 1e-5 if quick == (rank == 0) else 3e-5
        return now

    with (
        mock.patch.object(first_steps, "perf_counter", clock_of_the_candidate),
        mock.patch.object(first_steps, "measure_link", return_value=ONE_GBIT),
    ):
        for step in range(CHOSEN + 2):
            wrapped(inputs(rank, step)).square().sum().backward()
            buckets.append(len(wrapped.reducer.buckets))
    return buckets


@pytest.mark.parametrize("fastest", ["planned", "fixed caps"])
def test_the_candidate_that_rank_0_found_fastest_is_kept_on_every_rank(fastest):
    first, second = run_ranks(tried_on_a_link, 2, fastest)
    assert first == second
    tried = first[SETTLED - 1 : CHOSEN - 1]
    assert len(set(tried)) == 2  # both candidates were tried
    assert tried[0] > 1
    assert tried[-1] == 1
    assert (first[-1] > 1) == (fastest == "planned")


class OneUnused(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x):
        return self.used(x)


def static_graph_with_unused_parameters(rank: int):
    wrapped = DropIn(OneUnused(), bucket_plan="measured", static_graph=True)
    so_slow_that_one_bucket_is_best = LinkCost(latency=1.0, per_byte=1e-9)
    with mock.patch.object(
        first_steps, "measure_link", return_value=so_slow_that_one_bucket_is_best
    ):
        for step in range(SETTLED + 3):
            wrapped.zero_grad()
            wrapped(inputs(rank, step)).sum().backward()
    return wrapped._first_steps, wrapped.module.unused.weight.grad, wrapped.module.used.weight.grad


def test_a_static_graph_may_have_unused_parameters():
    (first, second) = run_ranks(static_graph_with_unused_parameters, 2)
    for clock_of_wrapped, unused, _ in (first, second):
        assert clock_of_wrapped is None
        assert unused is None
    assert torch.equal(first[2], second[2])


def measured_links(rank: int):
    slow = SlowLink(gbit_per_s=0.5, latency_us=2000)
    return measure_link(dist.group.WORLD), measure_link(slow)


def test_a_link_is_measured_no_faster_than_it_is():
    for loopback, slow in run_ranks(measured_links, 2):
        assert 4 * MIB * max(loopback.per_byte, loopback.copy_per_byte) < 1  # seconds
        assert slow.latency + 4 * MIB * slow.per_byte >= 2 * 2e-3 + 4 * MIB * 8e-9 / 0.5
        assert min(loopback) >= 0


def refusals(rank: int) -> list[str]:
    def hooked():
        wrapped = DropIn(model(), bucket_plan="measured")
        wrapped.register_comm_hook(None, comm_hooks.average)

    said = []
    for refused in (
        lambda: DropIn(model(), bucket_plan="best"),
        lambda: DropIn(model(), bucket_plan="measured", find_unused_parameters=True),
        lambda: DropIn(model(), bucket_plan="measured").join(),
        hooked,
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011, the texts are compared below
            refused()
        said.append(str(caught.value))
    return said


def test_what_it_does_not_go_with_is_refused_by_name():
    for unknown, unused, join, hook in run_ranks(refusals, 2):
        assert unknown == 'bucket_plan is \'best\': use "caps" or "measured"'
        assert "does not go with find_unused_parameters" in unused
        assert "does not go with join()" in join
        assert "does not go with a communication hook" in hook
