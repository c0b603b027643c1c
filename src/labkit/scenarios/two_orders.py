"""A model whose gradients become ready in another order on each rank."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from labkit.launch.ranks import run_ranks
from labkit.profiling.recording import RankRecording, Recorder
from labkit.scenarios.recorded_ways import Way
from labkit.scenarios.toy_steps import loss_of
from labkit.testing.compare import gradients


class EitherOrder(nn.Module):
    """Layers `a` and `b`, applied in the order given, and then `last`; all of one shape."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.a, self.b, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.order = order

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, 4) from (N, 4)."""
        for name in self.order:
            inputs = getattr(self, name)(inputs).tanh()
        return self.last(inputs)


class OneRank(NamedTuple):
    """What one rank saw.

    arrived: the layers in the order in which their gradients became ready.
    ready_at_launch: for each all-reduce, in launch order, how many gradients were ready.
    right: whether the gradients of a, b, and last are the average over the ranks.
    """

    arrived: str
    ready_at_launch: list[int]
    right: list[bool]


def run_in_two_orders(make: Way) -> list[OneRank]:
    """One step on two ranks: rank 0 applies a then b, rank 1 b then a.

    `make(module, process_group)` makes what averages; see `labkit.scenarios.recorded_ways`.
    """
    of_ranks = run_ranks(_step, 2, make, device="cpu")
    local = zip(*(own for _, own, _ in of_ranks), strict=True)
    wanted = [(one + other) / 2 for one, other in local]
    seen = []
    for recorded, _, found in of_ranks:
        right = [torch.allclose(*pair) for pair in zip(found, wanted, strict=True)]
        arrived = " ".join(gradient.parameter[0] for gradient in recorded.gradients)
        seen.append(OneRank(arrived, [one.after for one in recorded.order()], right))
    return seen


def _step(rank: int, make: Way) -> tuple[RankRecording, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = EitherOrder("ab" if rank == 0 else "ba")
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    loss_of(model(inputs)).backward()
    own = gradients(model)
    model.zero_grad()
    recorder = Recorder(model)
    averager = make(model, recorder)
    with recorder:
        loss_of(averager(inputs)).backward()
        if hasattr(averager, "finish"):
            averager.finish()
    return recorder.recorded, own, gradients(model)
