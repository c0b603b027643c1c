"""Two numbers that show what is wrong with a gradient: its ratio and cosine to the true one.

All parameters are flattened into one vector g and compared with the gradient g* of one process
that has the full batch:

- ratio  = ‖g‖ / ‖g*‖
- cosine = ⟨g, g*⟩ / (‖g‖ ‖g*‖)

A *scale bug* has cosine 1: one factor repairs it, and a learning rate or Adam may hide it.
A *direction bug* has a cosine below 1: no positive factor repairs it. Adam also hides a separate
factor per parameter, which is a direction bug over all of them.

`verdicts` judges several ways to compute one gradient, on several ranks:

    truth = gradient_of(model, lambda model: F.mse_loss(model(inputs), targets))
    found = run_ranks(work, 4)          # per rank: {"a variant's name": gradients(module), …}
    print(verdicts(found, truth).table())

If all ranks hold the same bits, a variant has one verdict. Otherwise it has one per rank: ranks
with different gradients diverge at the next step, and one number cannot show that. The same
functions judge any list of tensors, for example the change of the weights in an epoch (`moved`).
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from labkit.tables import Cell, table


class Comparison(NamedTuple):
    """How one gradient compares with the true one. Unpacks as `ratio, cosine`."""

    ratio: float
    cosine: float

    def __str__(self) -> str:
        return f"ratio {self.ratio:.4f}, cosine {self.cosine:.4f}"


def gradients(module: nn.Module) -> list[Tensor]:
    """A copy of each trainable parameter's gradient, in the module's order; zeros for None."""
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for p in module.parameters()
        if p.requires_grad
    ]


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """All elements of all tensors as one float64 vector on the CPU; a complex number is two."""
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    empty = torch.empty(0, dtype=torch.float64)
    return torch.cat([empty, *(t.detach().to("cpu", torch.float64).reshape(-1) for t in parts)])


def ratio_and_cosine(found: Iterable[Tensor], true: Iterable[Tensor]) -> Comparison:
    """Compare the gradients `found` with the `true` ones: same shapes, same order.

    Computed in float64. Raises ValueError if the shapes differ, or if either gradient is zero
    everywhere, because then neither number is defined.
    """
    found, true = _of_same_shapes(found, true)
    g, wanted = flatten(found), flatten(true)
    if not g.norm() or not wanted.norm():
        side = "compared" if wanted.norm() else "true"
        raise ValueError(f"the {side} gradient is zero everywhere: was backward() called?")
    cosine = torch.dot(g, wanted) / (g.norm() * wanted.norm())
    return Comparison(float(g.norm() / wanted.norm()), float(cosine))


def largest_difference(found: Iterable[Tensor], true: Iterable[Tensor]) -> float:
    """max |a − b| over all elements of all pairs; 0.0 means equal values.

    Raises ValueError if the shapes differ. A NaN on either side, or an infinity on both, gives NaN.
    """
    found, true = _of_same_shapes(found, true)
    difference = (flatten(found) - flatten(true)).abs()
    return float(difference.max()) if difference.numel() else 0.0


def same_bits(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether all elements are equal as float64: NaN equals NaN, and 0.0 differs from -0.0.

    Shapes and dtypes do not count.
    """
    return torch.equal(flatten(one).view(torch.int64), flatten(other).view(torch.int64))


def _of_same_shapes(
    found: Iterable[Tensor], true: Iterable[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    found, true = list(found), list(true)
    shapes, wanted = ([tuple(t.shape) for t in side] for side in (found, true))
    if shapes != wanted:
        raise ValueError(f"tensors of different shapes cannot be compared: {shapes} and {wanted}")
    return found, true


# Verdicts -----------------------------------------------------------------------------------------

Kind = Literal["right", "scale bug", "direction bug", "not finite", "zero"]

# What half precision does to a gradient by rounding stays below these, and counts as right.
_COSINE = 1e-4
_RATIO = 5e-3


class Verdict(NamedTuple):
    """The gradient of one variant on `ranks`: its ratio, its cosine, and its kind.

    `notes` are what a table says besides.
    """

    variant: str
    ranks: str
    comparison: Comparison
    kind: Kind
    notes: tuple[Cell, ...] = ()


class Verdicts(list[Verdict]):
    """One verdict per variant, or one per rank where the ranks differ."""

    def table(self, *headers: str, digits: int = 4) -> str:
        """One line per verdict; `headers` name the columns of notes."""
        rows = [[v.variant, v.ranks, *v.comparison, v.kind, *v.notes] for v in self]
        return table(["variant", "ranks", "ratio", "cosine", "verdict", *headers], rows, digits)


def gradient_of(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """The gradient of `loss_of(model)`, computed in this process on a copy of `model`.

    One tensor per trainable parameter, in the module's order. `model` is not changed.
    """
    model = copy.deepcopy(model)
    model.zero_grad()
    loss_of(model).backward()
    return gradients(model)


def weights(module: nn.Module) -> list[Tensor]:
    """A copy of each trainable parameter, in the module's order."""
    return [p.detach().clone() for p in module.parameters() if p.requires_grad]


def moved(module: nn.Module, start: Iterable[Tensor]) -> list[Tensor]:
    """The change of each trainable parameter of `module` since `start`, taken with `weights`."""
    return [now - before for now, before in zip(weights(module), start, strict=True)]


def kind_of(comparison: Comparison) -> Kind:
    """Right, or the kind of bug: scale (one factor repairs it) or direction (none does)."""
    ratio, cosine = comparison
    if ratio == 0:
        return "zero"
    if not (math.isfinite(ratio) and math.isfinite(cosine)):
        return "not finite"
    if cosine < 1 - _COSINE:
        return "direction bug"
    return "right" if abs(ratio - 1) < _RATIO else "scale bug"


def verdicts(
    of_ranks: Sequence[Mapping[str, Sequence[Tensor]]],
    truth: Sequence[Tensor] | Mapping[str, Sequence[Tensor]],
) -> Verdicts:
    """Compare what `run_ranks` returned, `[rank][variant]`, with the truth.

    `truth` is one gradient for all variants, or one per variant, by name. Raises ValueError if the
    ranks tried different variants, if shapes differ, or if the truth is zero everywhere.
    """
    variants = list(of_ranks[0])
    for rank, found in enumerate(of_ranks):
        if list(found) != variants:
            raise ValueError(f"rank 0 tried {variants}, rank {rank} {list(found)}: try the same")
    judged = Verdicts()
    for variant in variants:
        true = truth[variant] if isinstance(truth, Mapping) else truth
        found = [list(of_rank[variant]) for of_rank in of_ranks]
        agree = all(same_bits(one, found[0]) for one in found)
        for rank, one in enumerate(found[:1] if agree else found):
            ranks = "all" if agree else f"rank {rank}"
            comparison = compared(one, true)
            judged.append(Verdict(variant, ranks, comparison, kind_of(comparison)))
    return judged


def compared(found: Sequence[Tensor], true: Sequence[Tensor]) -> Comparison:
    """Like `ratio_and_cosine`, but a zero `found` alone has the ratio 0 and is no error."""
    if any(tensor.any() for tensor in true) and not any(tensor.any() for tensor in found):
        largest_difference(found, true)  # raises if the shapes differ
        return Comparison(0.0, math.nan)
    return ratio_and_cosine(found, true)
