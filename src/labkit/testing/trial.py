"""A training problem with a known answer, and one training step for every implementation.

`labkit.testing.invariants` runs implementations on it. An implementation is a callable
`wrap(module)`. Its result is used as a training loop would use it:

    wrapped(inputs)              the forward pass; the only required method
    wrapped.no_sync()            a context around every micro-batch but the last of a step
    wrapped.loss(losses, items)  the scalar to back-propagate, from one micro-batch's losses (one
                                 per item) and the number of this rank's items in the whole step
    wrapped.finish()             called after the last backward, before the optimizer's step
    wrapped.finish_and_clip(n)   the same if gradients are clipped to the norm n

The last four are optional. Without `loss`, the step back-propagates (W / N) · Σ losses, with W
ranks and N items in the step on all ranks. Its average over the ranks is the full batch's mean. So
torch's DistributedDataParallel is a `wrap` without changes, and a class of a few lines around your
own trainer can be one.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

Wrap = Callable[[nn.Module], Any]
FEATURES = 6
WIDTH = 8
WIDE = 384  # a square of float64 of this width has a little more than 1 MiB


class MicroBatch(NamedTuple):
    """One micro-batch of one rank: inputs (items, FEATURES) and targets (items,), both float64.

    `take` names the parts of the module that process this micro-batch, in order.
    """

    inputs: Tensor
    targets: Tensor
    take: tuple[str, ...] = ("a", "b", "c")


class InterruptedPassError(Exception):
    """Raised by `SmallModule` when a test asks for it."""


def _seed(seed: int) -> None:
    # torch.manual_seed seeds every kind of device, and keeps a stack trace for each that is absent.
    torch.default_generator.manual_seed(seed)


class SmallModule(nn.Module):
    """A trunk, three branches, a head, and a buffer: about 300 parameters in float64.

    The tensors of branches "a" and "b" have equal shapes; those of "c" have others. Branches run
    in the order of `take`, which may differ between ranks, so gradients may appear in another
    order or not at all. `fails_in` ("forward", "backward", or None) makes a pass raise
    `InterruptedPassError`. At that time the head and the branches have gradients, and the trunk
    has none.
    """

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            _seed(seed)
            self.trunk = nn.Linear(FEATURES, WIDTH)
            self.branches = nn.ModuleDict(
                {
                    "a": nn.Linear(WIDTH, WIDTH),
                    "b": nn.Linear(WIDTH, WIDTH),
                    "c": nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)),
                }
            )
            self.head = nn.Linear(WIDTH, 1)
            self.register_buffer("offset", torch.randn(WIDTH))
        self.take: tuple[str, ...] = ("a", "b", "c")
        self.fails_in: str | None = None
        self.to(device=device, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        """(items, FEATURES) → (items,)"""
        hidden = torch.tanh(self.trunk(inputs)) + self.offset
        if self.fails_in == "backward":
            hidden = _RaiseInBackward.apply(hidden)
        branched = [torch.tanh(self.branches[name](hidden)) for name in self.take]
        if self.fails_in == "forward":
            raise InterruptedPassError("in the forward pass, as told")
        return self.head(torch.stack(branched).sum(0)).squeeze(-1)


class TwoBuckets(nn.Module):
    """Two layers of more than 1 MiB each, applied in the order of `take`, in float64.

    With torch's default sizes (a first bucket of 1 MiB, then 25 MiB) they fill two buckets. On a
    rank that applies the layers in the opposite order, the buckets fill in the opposite order.
    `SmallModule` fits into one bucket.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            _seed(0)
            self.layers = nn.ModuleDict(
                {"a": nn.Linear(WIDE, WIDE), "b": nn.Linear(WIDE, WIDE, bias=False)}
            )
        self.take: tuple[str, ...] = ("a", "b")
        self.to(device=device, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        """(items, FEATURES) → (items,)"""
        hidden = nn.functional.pad(inputs, (0, WIDE - FEATURES))
        for name in self.take:
            hidden = torch.tanh(self.layers[name](hidden))
        return hidden.sum(-1)


TrialModule = SmallModule | TwoBuckets


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise InterruptedPassError("in the backward pass, as told")


def draw_batches(
    world_size: int,
    micro_batches: int = 1,
    uneven: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[list[MicroBatch]]:
    """`[rank][micro_batch]`, different on every rank: 4 items each, or 1 to 7 with `uneven`."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def draw(rank: int, micro: int) -> MicroBatch:
        items = 1 + (3 * rank + 5 * micro) % 7 if uneven else 4
        inputs = torch.randn(items, FEATURES, generator=generator, dtype=torch.float64)
        targets = torch.randn(items, generator=generator, dtype=torch.float64) + rank
        return MicroBatch(inputs.to(device), targets.to(device))

    return [[draw(rank, micro) for micro in range(micro_batches)] for rank in range(world_size)]


def item_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per item: (items,)"""
    return (outputs - targets).square()


def backward_passes(
    wrapped: Any, module: TrialModule, of_all: Sequence[Sequence[MicroBatch]], rank: int
) -> None:
    """The forward and backward passes of one step of rank `rank`, without `finish`."""
    mine = of_all[rank]
    items_here = sum(len(batch.targets) for batch in mine)
    items_in_step = sum(len(batch.targets) for one in of_all for batch in one)
    no_sync = getattr(wrapped, "no_sync", nullcontext)
    for number, batch in enumerate(mine, start=1):
        module.take = batch.take
        with nullcontext() if number == len(mine) else no_sync():
            losses = item_losses(wrapped(batch.inputs), batch.targets)
            if hasattr(wrapped, "loss"):
                loss = wrapped.loss(losses, items_here)
            else:
                loss = losses.sum() * (len(of_all) / items_in_step)
            loss.backward()


def step(
    wrapped: Any,
    module: TrialModule,
    of_all: Sequence[Sequence[MicroBatch]],
    rank: int,
    max_norm: float | None = None,
) -> None:
    """One training step of rank `rank`, up to but not including the optimizer's step.

    The combined gradients are in `module`, the module that was wrapped.
    `of_all[rank][micro_batch]` are the data of all ranks. With `max_norm`, the gradients are
    clipped to that norm.
    """
    backward_passes(wrapped, module, of_all, rank)
    if max_norm is not None and hasattr(wrapped, "finish_and_clip"):
        wrapped.finish_and_clip(max_norm)
        return
    if hasattr(wrapped, "finish"):
        wrapped.finish()
    if max_norm is not None:
        clip_grad_norm_(module.parameters(), max_norm)


def full_batch_step(
    module: TrialModule,
    of_all: Sequence[Sequence[MicroBatch]],
    max_norm: float | None = None,
) -> None:
    """The oracle: the same step in one process with the data of all ranks, in one batch per
    `take`.
    """
    batches = [batch for one in of_all for batch in one]
    items_in_step = sum(len(batch.targets) for batch in batches)
    for take in dict.fromkeys(batch.take for batch in batches):
        taking = [batch for batch in batches if batch.take == take]
        inputs, targets = (torch.cat(part) for part in zip(*(b[:2] for b in taking), strict=True))
        module.take = take
        (item_losses(module(inputs), targets).sum() / items_in_step).backward()
    if max_norm is not None:
        clip_grad_norm_(module.parameters(), max_norm)


def named_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """A copy of each trainable parameter's gradient, by name; None if it has none."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
