"""One data-parallel step of a model with two weights, and the mistakes that change its gradient.

The model is a·x + b with squared errors, in float64. `gradients_of_step` computes what every rank's
gradient would be, without starting ranks. The figure "One step, live" shows the same numbers.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

WEIGHTS = (0.5, 2.0)
LEARNING_RATE = 0.01
MICRO_BATCHES = 2

Sample = tuple[float, float]
Divide = Literal["own", "all", "none"]
Accumulate = Literal["off", "last", "each", "never"]


@dataclass(frozen=True)
class Step:
    """What the ranks do in one step.

    Attributes:
        samples: each rank's samples, as (x, y). With `accumulate` a rank needs two or more.
        divide: what a rank divides its summed loss by: its own number of samples (of each
            micro-batch, if it accumulates), the number on all ranks, or nothing.
        factor: multiplies every loss.
        combine: what an all-reduce does with the ranks' gradients.
        wrapped: forward through the wrapper; False calls the module inside, so that nothing is
            exchanged.
        accumulate: "off" is one backward per rank. Otherwise each rank has two micro-batches, and
            gradients are exchanged after the last, after each (no `no_sync`), or never (`no_sync`
            around both).
        over_k: divide a micro-batch's own mean by the number of micro-batches.
        absent: the last rank has run out of samples and sends zeros. An average divides by all W
            ranks ("zeros") or by those that have samples ("active").
    """

    samples: tuple[tuple[Sample, ...], ...]
    divide: Divide = "own"
    factor: float = 1.0
    combine: Literal["average", "sum"] = "average"
    wrapped: bool = True
    accumulate: Accumulate = "off"
    over_k: bool = True
    absent: Literal["none", "zeros", "active"] = "none"
    present: tuple[tuple[Sample, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        last = () if self.absent != "none" else self.samples[-1]
        object.__setattr__(self, "present", (*self.samples[:-1], last))
        if not any(self.present):
            raise ValueError("no rank has a sample")

    @property
    def synchronizes(self) -> bool:
        """Whether any gradient is exchanged."""
        return self.wrapped and self.accumulate != "never"


class StepGradients(NamedTuple):
    """The gradients of a step, each of shape (2,), float64.

    Attributes:
        local: per rank, the sum of what its backwards computed.
        final: per rank, what its optimizer gets.
        truth: the gradient of one process that has all samples, and the loss that is meant: their
            mean, or their sum if nothing is divided.
    """

    local: list[Tensor]
    final: list[Tensor]
    truth: Tensor


def model() -> nn.Linear:
    """The model with its starting weights: inputs (…, 1) to outputs (…, 1)."""
    linear = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.fill_(WEIGHTS[0])
        linear.bias.fill_(WEIGHTS[1])
    return linear


def batches_of_rank(step: Step, own: tuple[Sample, ...]) -> list[tuple[Sample, ...]]:
    """A rank's samples, as its backwards see them; the first of two has the odd one."""
    if step.accumulate == "off":
        return [own]
    first = -(-len(own) // MICRO_BATCHES)
    return [own[:first], own[first:]]


def loss_of_batch(step: Step, network: nn.Module, batch: tuple[Sample, ...]) -> Tensor:
    """The loss on which a rank calls backward for `batch`, which is not empty."""
    x, y = torch.tensor(batch, dtype=torch.float64).T.unsqueeze(-1)
    loss = (network(x) - y).square().sum() * step.factor
    if step.divide == "all":
        return loss / sum(map(len, step.present))
    if step.divide == "none":
        return loss
    accumulated = step.accumulate != "off" and step.over_k
    return loss / len(batch) / (MICRO_BATCHES if accumulated else 1)


def gradients_of_step(step: Step) -> StepGradients:
    """Every rank's gradient. Raises ValueError if a rank that accumulates has one sample."""
    computed = [[_gradient(step, b) for b in batches_of_rank(step, own)] for own in step.present]
    local = [torch.stack(own).sum(dim=0) for own in computed]
    if not step.synchronizes:
        final = local
    elif step.accumulate == "each":
        held = torch.zeros(2, dtype=torch.float64)
        for batch in range(MICRO_BATCHES):
            held = _all_reduced(step, [held + own[batch] for own in computed])
        final = [held] * len(local)
    else:
        final = [_all_reduced(step, local)] * len(local)
    everything = tuple(sample for own in step.present for sample in own)
    divide: Divide = "none" if step.divide == "none" else "own"
    return StepGradients(local, final, _gradient(Step((everything,), divide), everything))


def after_one_update(gradient: Tensor, optimizer: type[torch.optim.Optimizer]) -> Tensor:
    """The two weights after the first update by `optimizer` with `LEARNING_RATE`."""
    network = model()
    network.weight.grad, network.bias.grad = gradient[:1].view(1, 1).clone(), gradient[1:].clone()
    optimizer(network.parameters(), lr=LEARNING_RATE).step()
    return torch.cat([network.weight.detach().view(-1), network.bias.detach()])


def _gradient(step: Step, batch: tuple[Sample, ...]) -> Tensor:
    if not batch:
        if step.absent == "none":
            raise ValueError("a rank has no sample for one of its micro-batches")
        return torch.zeros(2, dtype=torch.float64)
    network = model()
    loss_of_batch(step, network, batch).backward()
    return torch.cat([network.weight.grad.view(-1), network.bias.grad])


def _all_reduced(step: Step, sent: list[Tensor]) -> Tensor:
    """The combination of what the ranks send; a rank without samples sends zeros."""
    active = [g for g, own in zip(sent, step.present, strict=True) if own]
    total = torch.stack(active).sum(dim=0)
    if step.combine == "sum":
        return total
    return total / (len(active) if step.absent == "active" else len(sent))
