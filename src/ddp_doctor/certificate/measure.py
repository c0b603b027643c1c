"""Two gradients side by side: ratio, cosine, the worst parameter, and what the ratio is called."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_doctor.facts.certificate import Kind, Worst

Gradients = Mapping[str, Tensor]
TOLERANCE = 1e-3  # relative; float32 sums in another order stay far below it
HALF = 5e-3  # relative; where half precision takes part, which rounds each element
SMALL = 1e-5  # a parameter whose gradient is below this part of the whole gradient is not judged
CHUNK = 1 << 18  # elements that are compared at a time


@dataclass(frozen=True)
class Row:
    """One parameter: the length of each gradient and of their difference; their product."""

    key: str
    name: str
    length: float
    reference: float
    product: float
    gap: float


@dataclass(frozen=True)
class Comparison:
    """A gradient g against a reference r: `error` is ‖g − r‖ / ‖r‖; `kind` what follows from it."""

    kind: Kind
    ratio: float
    cosine: float
    error: float
    worst_first: list[Worst]  # the parameters that count, the one that is furthest off first
    rows: list[Row]

    @property
    def worst(self) -> Worst | None:
        return next(iter(self.worst_first), None)

    def by_optimizer(self, tolerance: float) -> "list[Comparison]":
        """The same for each optimizer's parameters."""
        rows: dict[int, list[Row]] = {}
        for row in self.rows:
            rows.setdefault(int(row.key.partition(".")[0]), []).append(row)
        return [comparison_of(part, tolerance) for part in rows.values()]


def compare(
    gradients: Gradients,
    reference: Gradients,
    names: Mapping[str, str],
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare over all parameters and per parameter. A missing gradient counts as zero.

    Raises ValueError if shapes differ. Cost: one pass over both, and a megabyte or so.
    """
    sides = (gradients, reference)
    if other_shapes(gradients, reference):
        raise ValueError("the two gradients are of different shapes")
    rows = []
    for key in sorted(gradients.keys() | reference.keys()):
        sums = [0.0] * 4
        double = any(side[key].dtype == torch.float64 for side in sides if key in side)
        dtype = torch.float64 if double else torch.float32
        for a, b in _chunks([side.get(key) for side in sides], dtype):
            for at, (x, y) in enumerate(((a, a), (b, b), (a, b), (a - b, a - b))):
                sums[at] += float(x @ y)
        lengths = [math.sqrt(sums[at]) for at in (0, 1, 3)]
        rows.append(Row(key, names.get(key, key), lengths[0], lengths[1], sums[2], lengths[2]))
    return comparison_of(rows, tolerance)


def other_shapes(left: Gradients, right: Gradients) -> bool:
    """Whether a parameter's gradients are of different shapes."""
    return any(left[key].shape != right[key].shape for key in left.keys() & right.keys())


def unusable(gradient: Gradients) -> str:
    """Why a gradient cannot be compared with another; empty if it can."""
    for name, tensor in gradient.items():
        if not tensor.isfinite().all():
            return f"the gradient of {name} holds NaN or infinity"
    if not any(bool(tensor.any()) for tensor in gradient.values()):
        return "the gradient is zero everywhere, so there is nothing to compare"
    return ""


def _chunks(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Pieces of tensors of one shape, flat and of one type; a missing one is zero."""
    length = max(0 if tensor is None else tensor.numel() for tensor in tensors)
    flat = [torch.zeros(1) if t is None else t.flatten() for t in tensors]
    for start in range(0, length, CHUNK):
        size = min(CHUNK, length - start)
        yield [
            torch.zeros(size, dtype=dtype)
            if tensor is None
            else part[start : start + size].to(dtype)
            for tensor, part in zip(tensors, flat, strict=True)
        ]


def comparison_of(rows: list[Row], tolerance: float = TOLERANCE) -> Comparison:
    """What parameters have in common.

    Equal: the error is within the tolerance, of every parameter within ten times that. Scaled: it
    is so once the gradient is divided by the ratio. Different: neither, or not a number.
    """
    length, reference = _norm(r.length for r in rows), _norm(r.reference for r in rows)
    ratio, cosine = _ratio_and_cosine(length, reference, sum(row.product for row in rows))
    error = _norm(row.gap for row in rows) / (reference or 1.0)
    limit = SMALL * max(length, reference)
    rows_that_count = [row for row in rows if max(row.length, row.reference) > limit]
    parameters = []
    for row in rows_that_count:
        a, b = (n if n > limit else 0.0 for n in (row.length, row.reference))
        parameters.append(Worst(row.name, *_ratio_and_cosine(a, b, row.product)))
    parameters.sort(key=lambda w: -abs(w.ratio - 1) - abs(w.cosine - 1))
    kind: Kind = "different"
    if error <= tolerance and all(
        row.gap <= 10 * tolerance * (row.reference or 1.0) for row in rows_that_count
    ):
        kind = "equal"
    elif (
        error < math.inf
        and _angle(cosine) <= tolerance
        and all(_angle(w.cosine) + abs(w.ratio / ratio - 1) <= 10 * tolerance for w in parameters)
    ):
        kind = "scaled"
    return Comparison(kind, ratio, cosine, error, parameters, rows)


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def _angle(cosine: float) -> float:
    """The distance of two directions: the error that is left when the lengths are made equal."""
    return math.sqrt(max(0.0, 2 * (1 - cosine)))


def _ratio_and_cosine(length: float, reference: float, product: float) -> tuple[float, float]:
    if not length or not reference:
        return (1.0, 1.0) if length == reference else (math.inf if length else 0.0, 0.0)
    return length / reference, product / (length * reference)


def factor_name(ratio: float, world: int, tolerance: float = TOLERANCE) -> str | None:
    """What a factor is called in terms of W ranks; None if nothing fits."""
    names = {"W": world, "1/W": 1 / world, "W²": world**2, "1/W²": 1 / world**2}
    names |= {"√W": math.sqrt(world), "1/√W": 1 / math.sqrt(world)}
    if abs(ratio - 1) <= tolerance:
        return None
    fits = (name for name, value in names.items() if abs(ratio / value - 1) <= tolerance)
    return next(fits, None)


def shares(union: Gradients, ranks: Gradients, rank_0: Gradients) -> tuple[float, float] | None:
    """How one process weighs the samples of ranks 0 and 1, relative to the ranks' equal weights.

    `union` is one process's gradient of both ranks' samples, `ranks` the average of the two ranks'
    gradients, and `rank_0` the gradient of rank 0's samples. If each rank divides by a count of its
    own, `union` is a combination of the other two, and the weights add up to 1. None if it is not,
    or has the same weights.
    """
    keys = sorted(union)
    if not keys or not all(key in ranks and key in rank_0 for key in keys):
        return None
    products = torch.zeros(3, 3, dtype=torch.float64)  # of the three with one another
    for key in keys:
        for chunk in _chunks([ranks[key], rank_0[key], union[key]], torch.float64):
            matrix = torch.stack(chunk)
            products += matrix @ matrix.T
    basis, target, square = products[:2, :2], products[:2, 2], products[2, 2]
    weights = torch.linalg.lstsq(basis, target[:, None], driver="gelsd").solution.flatten()
    residue = square - 2 * weights @ target + weights @ basis @ weights
    if float(residue) > (5 * TOLERANCE) ** 2 * float(square):
        return None
    share_1 = float(weights[0]) / 2  # the average holds half of each
    share_0 = share_1 + float(weights[1])
    if abs(share_1 - 0.5) <= 5 * TOLERANCE or abs(share_0 + share_1 - 1) > 5 * TOLERANCE:
        return None
    return share_0, share_1
