"""DDP, ZeRO, and fully sharded training: the same update, and what each rank sends and holds.

Start it with torchrun, for example

    torchrun --standalone --nproc-per-node 4 labs/in_pieces.py

Each way trains the same model for two steps of SGD with momentum, every rank on its own samples.
The output has one line per way:

1. The error of the change of the weights, relative to one process with all samples.
2. The bytes that a rank sends per step, if every collective is a ring.
3. The bytes that a rank holds between steps: parameters, gradients, momentum.

The bytes are counted, from the collectives and the tensors' memory, and shown in units of the
parameters' bytes, Ψ.

The exit code is 1 if the change of the weights is wrong on any rank.
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from labkit.launch.arguments import explained_by, parse_arguments, positive

TOLERANCE = 1e-5  # relative, in float32


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument("--width", type=positive, default=256, help="of a layer (default 256)")
    parser.add_argument("--layers", type=positive, default=3, help="layers (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    ARGUMENTS = parse_arguments(parser)

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from labkit.launch.lab import Place, join_ranks, largest_on_any_rank
from labkit.profiling.step_cost import StepCost, step_cost
from labkit.tables import bound, table
from labkit.testing.compare import largest_difference, moved, weights
from miniddp.sharded import Zero2, Zero2Optimizer, ZeroRedundancyOptimizer, fully_shard

Way = Callable[[nn.Module], tuple[nn.Module, Optimizer]]
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
SAMPLES = 4  # per rank


class WayOutcome(NamedTuple):
    """The largest relative error of the change of the weights on any rank, and the cost."""

    error: float
    cost: StepCost


def replicated(module: nn.Module, kind: Callable[..., Optimizer]) -> tuple[nn.Module, Optimizer]:
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return model, kind(model.parameters(), **MOMENTUM)


def zero_2(module: nn.Module) -> tuple[nn.Module, Optimizer]:
    model = Zero2(module)
    return model, Zero2Optimizer(model, SGD, **MOMENTUM)


def sharded(module: nn.Module, how: Callable, **options: Any) -> tuple[nn.Module, Optimizer]:
    for layer in module.children():
        how(layer, **options)
    return how(module, **options), SGD(module.parameters(), **MOMENTUM)


WAYS: dict[str, Way] = {
    "torch DDP": partial(replicated, kind=SGD),
    "ZeRO-1": partial(replicated, kind=partial(ZeroRedundancyOptimizer, optimizer_class=SGD)),
    "ZeRO-2": zero_2,
    "fully_shard": partial(sharded, how=fully_shard),
    "fully_shard, kept whole": partial(sharded, how=fully_shard, reshard_after_forward=False),
    "torch fully_shard": partial(sharded, how=torchs_fully_shard),
}


def whole(parameter: Tensor) -> Tensor:
    """A parameter's whole values, from this rank's part of it."""
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor()
    sharding = getattr(parameter, "sharding", None)
    return sharding.gather(parameter.detach()) if sharding else parameter.detach()


def build_layers(arguments: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    width = arguments.width
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(arguments.layers)))


def loss_on(samples: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(samples).square().mean()


def try_ways(arguments: argparse.Namespace, place: Place) -> tuple[int, dict[str, WayOutcome]]:
    """The bytes of the parameters, and what each way gave."""
    size = (place.world_size, SAMPLES, arguments.width)
    samples = torch.randn(size, generator=torch.Generator().manual_seed(arguments.seed))
    samples = samples.to(place.device)
    model = build_layers(arguments).to(place.device)
    start = weights(model)
    alone = copy.deepcopy(model)
    step_cost(alone, SGD(alone.parameters(), **MOMENTUM), loss_on(samples.flatten(0, 1)))
    wanted = moved(alone, start)
    largest = max(change.abs().max().item() for change in wanted)
    found = {}
    for name, way in WAYS.items():
        wrapped, optimizer = way(copy.deepcopy(model))
        cost = step_cost(wrapped, optimizer, loss_on(samples[place.rank]))
        changes = [whole(p) - s for p, s in zip(wrapped.parameters(), start, strict=True)]
        error = largest_on_any_rank(largest_difference(changes, wanted) / largest)
        found[name] = WayOutcome(error, cost)
    return sum(tensor.nbytes for tensor in start), found


def main(arguments: argparse.Namespace) -> None:
    with join_ranks() as place:
        size, found = try_ways(arguments, place)
    # `not <=` and not `>`: a NaN has to fail, and compares as False.
    wrong = [name for name, outcome in found.items() if not outcome.error <= TOLERANCE]
    if place.rank == 0:
        print(f"{place.world_size} ranks, Ψ = {size:,} bytes of parameters")
        rows: list[list[Any]] = [
            [name, bound(error, TOLERANCE), *(n / size for n in (cost.sent, cost.held, *cost[1:]))]
            for name, (error, cost) in found.items()
        ]
        headers = ["", "error", "sent ÷ Ψ", "held ÷ Ψ"]
        print(table([*headers, "parameters", "gradients", "momentum"], rows, digits=2))
        for name in wrong:
            print(f"\n{name} does not give the update of one process with all samples.")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main(ARGUMENTS)
