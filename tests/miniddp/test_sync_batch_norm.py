"""SyncBatchNorm on CPUs against plain BatchNorm on the full batch: outputs, gradients, statistics.

torch's own SyncBatchNorm refuses CPU tensors and so is no oracle here; torch's BatchNorm is, and
torch's DDP averages the gradients.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.launch.ranks import run_ranks
from labkit.testing.compare import largest_difference
from labkit.testing.watch import RecordedCollectives
from miniddp.sync_batch_norm import SyncBatchNorm
from tests.on_ranks import on_ranks

CHANNELS = 3


@dataclass(frozen=True)
class Case:
    """One layer, its input's shape behind (N, C), and how many rows each rank has."""

    rows: tuple[int, ...]
    plain: type[nn.Module] = nn.BatchNorm1d
    behind: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    offset: float = 0.0
    layout: torch.memory_format = torch.contiguous_format
    groups: tuple[tuple[int, ...], ...] = ()
    """Of ranks, for statistics of their own; without them, all ranks share one."""

    def layer(self, of_class: type[nn.Module]) -> nn.Module:
        layer = of_class(CHANNELS, dtype=self.dtype, **self.options)
        if self.groups and of_class is SyncBatchNorm:
            made = [dist.new_group(list(group)) for group in self.groups]
            of_rank = zip(made, self.groups, strict=True)
            [layer.process_group] = [one for one, ranks in of_rank if dist.get_rank() in ranks]
        with torch.no_grad():
            for i, parameter in enumerate(layer.parameters()):
                parameter.copy_(torch.linspace(0.5 + i, 2.0, CHANNELS))
        return layer

    def step(self, rank: int, number: int) -> tuple[Tensor, Tensor]:
        """The rank's input of a step, and the weights of its outputs in the loss."""
        generator = torch.Generator().manual_seed(10 * number + rank)
        shape = (self.rows[rank], CHANNELS, *self.behind)
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * (rank + 1) + rank
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        x, weights = (x + self.offset).to(self.dtype), weights.to(self.dtype)
        return x.to(memory_format=self.layout), weights


EVEN, UNEVEN = (4, 4), (5, 1, 2)
CASES = {
    "1d": Case(EVEN),
    "1d, uneven": Case(UNEVEN),
    "1d, a rank with nothing": Case((3, 0, 2)),
    "1d, one row each": Case((1, 1, 1)),
    "1d, sequences": Case(UNEVEN, behind=(5,)),
    "2d": Case(UNEVEN, nn.BatchNorm2d, (3, 2)),
    "2d, channels last": Case(UNEVEN, nn.BatchNorm2d, (3, 2), layout=torch.channels_last),
    "3d": Case(UNEVEN, nn.BatchNorm3d, (2, 3, 2)),
    "no affine": Case(UNEVEN, options={"affine": False}),
    "cumulative": Case(UNEVEN, options={"momentum": None}),
    "other momentum and eps": Case(UNEVEN, options={"momentum": 0.7, "eps": 0.5}),
    "not tracked": Case(UNEVEN, options={"track_running_stats": False}),
    "four ranks": Case((1, 2, 3, 4), nn.BatchNorm2d, (2, 2)),
    "two groups": Case((1, 2, 3, 4), nn.BatchNorm2d, (2, 2), groups=((0, 2), (1, 3))),
}
if "bias" in inspect.signature(nn.BatchNorm1d).parameters:  # not in torch 2.11
    CASES["no bias"] = Case(UNEVEN, options={"bias": False})


def train_and_evaluate(
    layer: nn.Module, steps: list[tuple[Tensor, Tensor]]
) -> dict[str, list[Tensor]]:
    """All that the layer computes in some training steps and one evaluation."""
    found: dict[str, list[Tensor]] = {"outputs": [], "input gradients": []}
    for x, weights in steps:
        x = x.detach().clone().requires_grad_()
        y = layer(x)
        (y * weights).sum().backward()
        found["outputs"].append(y.detach())
        found["input gradients"].append(x.grad)
    found["parameter gradients"] = [p.grad for p in layer.parameters()]
    found["buffers"] = list(layer.buffers())
    layer.eval()
    if layer.track_running_stats:  # otherwise it is another computation: a test of its own, below
        found["evaluation"] = [layer(x).detach() for x, _ in steps]
    return found


def synced(rank: int, cases: dict[str, Case]) -> dict[str, dict[str, list[Tensor]]]:
    return {
        name: train_and_evaluate(case.layer(SyncBatchNorm), [case.step(rank, n) for n in range(3)])
        for name, case in cases.items()
    }


@cache
def of_ranks(world_size: int) -> list[Any]:
    """Every case of this world size in one run."""
    cases = {name: case for name, case in CASES.items() if len(case.rows) == world_size}
    return run_ranks(synced, world_size, cases)


def full_batch(case: Case, group: tuple[int, ...]) -> dict[str, list[Tensor]]:
    of_steps = [[case.step(rank, n) for rank in group] for n in range(3)]
    joined = [tuple(map(torch.cat, zip(*of_ranks, strict=True))) for of_ranks in of_steps]
    return train_and_evaluate(case.layer(case.plain), joined)


@pytest.mark.parametrize("name", CASES)
def test_all_that_it_computes_is_what_batch_norm_computes_on_the_full_batch(name: str) -> None:
    case = CASES[name]
    for group in case.groups or (tuple(range(len(case.rows))),):
        wanted = full_batch(case, group)
        of_rank = [of_ranks(len(case.rows))[rank][name] for rank in group]
        for kind in {"outputs", "input gradients", "evaluation"} & wanted.keys():
            for step, full in enumerate(wanted[kind]):
                parts = full.split([case.rows[rank] for rank in group])
                for found, part in zip(of_rank, parts, strict=True):
                    assert largest_difference([found[kind][step]], [part]) < 1e-12, kind
        # Each rank has its own share of the gradients of weight and bias: DDP averages them.
        for index, gradient in enumerate(wanted["parameter gradients"]):
            added = sum(found["parameter gradients"][index] for found in of_rank)
            assert largest_difference([added], [gradient]) < 1e-12
        for found in of_rank:
            assert largest_difference(found["buffers"], wanted["buffers"]) < 1e-12
            assert largest_difference(found["buffers"], of_rank[0]["buffers"]) == 0.0


@on_ranks(3)
def test_in_eval_without_running_statistics_each_rank_takes_its_own_batch(rank: int) -> None:
    case = CASES["not tracked"]
    x, _ = case.step(rank, 0)
    if rank != 1:  # exchanges nothing: the others do not wait for rank 1
        sync, plain = case.layer(SyncBatchNorm).eval(), case.layer(nn.BatchNorm1d).eval()
        assert torch.equal(sync(x), plain(x))


@on_ranks(2)
def test_tracking_that_is_switched_off_leaves_the_buffers_alone(rank: int) -> None:
    case, untouched = CASES["1d"], list(nn.BatchNorm1d(CHANNELS).buffers())
    full = torch.cat([case.step(rank, 0)[0] for rank in range(2)])
    wanted = case.layer(nn.BatchNorm1d)(full).detach().split(case.rows)
    layer = case.layer(SyncBatchNorm)
    layer.track_running_stats = False
    y = layer(case.step(rank, 0)[0])
    assert largest_difference(layer.buffers(), untouched) == 0.0
    assert largest_difference([y], [wanted[rank]]) < 1e-12


def test_a_mean_far_beyond_the_deviation_costs_no_digits_and_halves_are_summed_in_float32() -> None:
    far = Case(UNEVEN, dtype=torch.float32, offset=4096.0)
    halves = Case(UNEVEN, dtype=torch.bfloat16)

    def work(rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        y = far.layer(SyncBatchNorm)(far.step(rank, 0)[0])
        mixed = SyncBatchNorm(CHANNELS)  # float32 parameters, as autocast has it
        return y.detach(), mixed(halves.step(rank, 0)[0]).detach(), list(mixed.buffers())

    of_far, of_halves, buffers = zip(*run_ranks(work, 3), strict=True)
    full = torch.cat([far.step(rank, 0)[0] for rank in range(3)]).double()
    wanted = Case(UNEVEN).layer(nn.BatchNorm1d)(full)
    assert largest_difference([torch.cat(of_far)], [wanted]) < 2e-3

    full = torch.cat([halves.step(rank, 0)[0] for rank in range(3)]).float()
    layer = nn.BatchNorm1d(CHANNELS)
    wanted = layer(full)
    assert {y.dtype for y in of_halves} == {torch.bfloat16}
    assert largest_difference([torch.cat(of_halves)], [wanted]) < 2e-2  # one unit of bfloat16
    for of_rank in buffers:
        assert largest_difference(of_rank, list(layer.buffers())) < 1e-6


@on_ranks(3)
def test_forward_costs_one_all_gather_and_backward_one_all_reduce_of_the_promised_bytes(
    rank: int,
) -> None:
    layer = SyncBatchNorm(CHANNELS, dtype=torch.float64)
    x = CASES["1d, uneven"].step(rank, 0)[0].requires_grad_()
    with RecordedCollectives() as watch:
        layer(x).sum().backward()
        layer(x.detach()).sum().backward()  # nothing to send back: no collective in backward
    gather, reduce = ("allgather_", 2 * CHANNELS * 8 + 8), ("allreduce_", 2 * CHANNELS * 8)
    found = [(one.op, torch.Size(one.shapes[-1]).numel() * 8) for one in watch.launched]
    assert found == [gather, reduce, gather]


@on_ranks(3)
def test_an_input_that_cannot_be_normalized_is_refused_on_every_rank(rank: int) -> None:
    too_few = "only 1 value per channel on all ranks together: training needs 2 or more"
    for x, said in (
        (torch.ones(1 if rank == 2 else 0, CHANNELS), too_few),
        (torch.ones(4, CHANNELS + 1), r"input has shape \(4, 4\), expected \(N, 3, \*\)"),
        (torch.ones(CHANNELS), r"input has shape \(3,\), expected \(N, 3, \*\)"),
    ):
        with pytest.raises(ValueError, match=said):
            SyncBatchNorm(CHANNELS)(x)
    dist.barrier()  # nobody was left behind in a collective


@on_ranks(2)
def test_a_batch_that_is_empty_on_every_rank_moves_nothing_and_is_in_no_average(rank: int) -> None:
    layer = SyncBatchNorm(CHANNELS)
    x = torch.ones(0, CHANNELS, 2, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, CHANNELS, 2)
    kept = [value.tolist() for value in (*(p.grad for p in layer.parameters()), *layer.buffers())]
    assert kept == [[0] * CHANNELS] * 3 + [[1] * CHANNELS, 0]
    averaging = SyncBatchNorm(CHANNELS, momentum=None)
    for step, rows in enumerate((2, 0, 2)):
        averaging(torch.full((rows, CHANNELS), float(rank + step)))
    mean, variance, batches = averaging.buffers()
    assert mean.tolist() == pytest.approx([(0.5 + 2.5) / 2] * CHANNELS)
    assert variance.tolist() == pytest.approx([1 / 3] * CHANNELS)
    assert batches == 2


def without_bias(layer: nn.Module) -> nn.Module:
    layer.register_parameter("bias", None)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(CHANNELS, eps=0.1, momentum=0.3),
        lambda: nn.BatchNorm2d(CHANNELS, momentum=None, affine=False),
        lambda: nn.BatchNorm3d(CHANNELS, track_running_stats=False).eval(),
        lambda: without_bias(nn.SyncBatchNorm(CHANNELS)),
        lambda: SyncBatchNorm(CHANNELS).double(),
    ],
)
def test_conversion_takes_over_what_the_layer_is_and_holds(make: Callable[[], nn.Module]) -> None:
    layer = make()
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    found = SyncBatchNorm.convert_sync_batchnorm(layer)
    assert type(found) is SyncBatchNorm
    assert found is not layer
    names = ["num_features", "eps", "momentum", "affine", "track_running_stats", "training"]
    assert [getattr(found, n) for n in names] == [getattr(layer, n) for n in names]
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert getattr(found, name) is getattr(layer, name)
    assert found.state_dict().keys() == layer.state_dict().keys()


def test_conversion_goes_through_the_tree_and_keeps_shared_parameters_shared() -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(shared, nn.Linear(4, 4)))
    model.register_module("again", shared)
    model.register_module("nothing", None)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert type(model[1]) is SyncBatchNorm
    assert model[1].weight is model[2][0].weight is model.again.weight
    assert model[1].num_batches_tracked is model[2][0].num_batches_tracked
    assert [a is b for a, b in zip(model.parameters(), parameters, strict=True)] == [True] * 6
    assert list(model.state_dict()) == keys
    assert not [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]


def test_a_lazy_layer_has_to_see_an_input_first() -> None:
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="LazyBatchNorm1d has no channels yet: run one forward"):
        SyncBatchNorm.convert_sync_batchnorm(lazy)
    lazy(torch.randn(3, 4))
    assert SyncBatchNorm.convert_sync_batchnorm(lazy)[0].num_features == 4


def test_without_a_process_group_it_is_batch_norm() -> None:
    case = CASES["cumulative"]
    steps = [case.step(0, n) for n in range(3)]
    found = train_and_evaluate(case.layer(SyncBatchNorm), steps)
    wanted = train_and_evaluate(case.layer(nn.BatchNorm1d), steps)
    assert all(largest_difference(found[kind], wanted[kind]) == 0.0 for kind in wanted)
    alone = nn.BatchNorm1d(CHANNELS), SyncBatchNorm(CHANNELS)
    for layer in alone:
        layer.track_running_stats = False
        layer(torch.randn(4, CHANNELS))
    assert largest_difference(alone[0].buffers(), alone[1].buffers()) == 0.0
