"""Two numbers that show what is wrong with a gradient: its ratio and cosine to the true one.

All parameters are flattened into one vector g and compared with the gradient g* of one process
that has the full batch:

- ratio  = ‖g‖ / ‖g*‖
- cosine = ⟨g, g*⟩ / (‖g‖ ‖g*‖)

A *scale bug* has cosine 1: one factor repairs it, and a learning rate or Adam may hide it.
A *direction bug* has a cosine below 1: no positive factor repairs it. Adam also hides a separate
factor per parameter, which is a direction bug over all of them.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


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
