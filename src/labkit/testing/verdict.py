"""Judge several ways to compute one gradient: ratio, cosine, and the kind of bug.

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

from torch import Tensor, nn

from labkit.tables import Cell, table
from labkit.testing.compare import (
    Comparison,
    gradients,
    largest_difference,
    ratio_and_cosine,
    same_bits,
)

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
