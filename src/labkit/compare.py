"""The two figures that tell what is wrong with a gradient: its ratio and its cosine to the true one.

Over all parameters, flattened into one vector g, against the gradient g* that is wanted (that of the
single-process full batch):

- ratio  = ‖g‖ / ‖g*‖
- cosine = ⟨g, g*⟩ / (‖g‖ ‖g*‖)

A *scale bug* has cosine 1: some factor repairs it, and a learning rate or Adam hides it.
A *direction bug* has a cosine below 1: no factor repairs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Comparison(NamedTuple):
    """How one gradient stands to the true one. Unpacks as `ratio, cosine`."""

    ratio: float
    cosine: float

    def __str__(self) -> str:
        return f"ratio {self.ratio:.4f}, cosine {self.cosine:.4f}"


def gradients(module: nn.Module) -> list[Tensor]:
    """A copy of every trainable parameter's gradient, in the module's order; zeros where it is None."""
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for p in module.parameters()
        if p.requires_grad
    ]


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """All elements of all tensors as one float64 vector on the CPU."""
    return torch.cat([t.detach().to("cpu", torch.float64).reshape(-1) for t in tensors])


def ratio_and_cosine(found: Sequence[Tensor], true: Sequence[Tensor]) -> Comparison:
    """Compare the gradients `found` with the `true` ones: tensors of the same shapes in the same order.

    Computed in float64. Raises ValueError if the shapes differ, or if either gradient is zero, for
    then neither figure means anything.
    """
    shapes = [[tuple(t.shape) for t in side] for side in (found, true)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"gradients of different shapes cannot be compared: {shapes[0]} and {shapes[1]}"
        )
    g, wanted = flatten(found), flatten(true)
    if not g.norm() or not wanted.norm():
        side = "compared" if wanted.norm() else "true"
        raise ValueError(f"the {side} gradient is zero everywhere: was backward() called?")
    cosine = torch.dot(g, wanted) / (g.norm() * wanted.norm())
    return Comparison(float(g.norm() / wanted.norm()), float(cosine))


def largest_difference(found: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """max |a − b| over all elements of all pairs; 0.0 means equal to the bit (NaNs aside)."""
    return max(
        (
            float((a.double() - b.double()).abs().max())
            for a, b in zip(found, true, strict=True)
            if a.numel()
        ),
        default=0.0,
    )
