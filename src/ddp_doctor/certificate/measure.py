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
    got: float
    wanted: float
    dot: float
    gap: float


@dataclass(frozen=True)
class Comparison:
    """`got` against `wanted`. `error` is ‖got − wanted‖ / ‖wanted‖; `kind` what follows from it."""

    kind: Kind
    ratio: float
    cosine: float
    error: float
    by_worst: list[Worst]  # the parameters that count, the one that is furthest off first
    rows: list[Row]

    @property
    def worst(self) -> Worst | None:
        return next(iter(self.by_worst), None)

    def by_optimizer(self, tolerance: float) -> "list[Comparison]":
        """The same for each optimizer's parameters."""
        found: dict[int, list[Row]] = {}
        for row in self.rows:
            found.setdefault(int(row.key.partition(".")[0]), []).append(row)
        return [judged(rows, tolerance) for rows in found.values()]


def compare(
    got: Gradients, wanted: Gradients, names: Mapping[str, str], tolerance: float = TOLERANCE
) -> Comparison:
    """Compare over all parameters and per parameter. A missing gradient counts as zero.

    Raises ValueError if shapes differ. Cost: one pass over both, and a megabyte or so.
    """
    if any(got[key].shape != wanted[key].shape for key in got.keys() & wanted.keys()):
        raise ValueError("the two gradients are of different shapes")
    rows = []
    for key in sorted(got.keys() | wanted.keys()):
        sums = [0.0] * 4
        exact = any(side[key].dtype == torch.float64 for side in (got, wanted) if key in side)
        kind = torch.float64 if exact else torch.float32
        for a, b in _chunks([got.get(key), wanted.get(key)], kind):
            for at, (x, y) in enumerate(((a, a), (b, b), (a, b), (a - b, a - b))):
                sums[at] += float(x @ y)
        lengths = [math.sqrt(sums[at]) for at in (0, 1, 3)]
        rows.append(Row(key, names.get(key, key), lengths[0], lengths[1], sums[2], lengths[2]))
    return judged(rows, tolerance)


def unusable(gradient: Gradients) -> str:
    """Why a gradient cannot be compared with another; empty if it can."""
    for name, tensor in gradient.items():
        if not tensor.isfinite().all():
            return f"the gradient of {name} holds NaN or infinity"
    if not any(bool(tensor.any()) for tensor in gradient.values()):
        return "the gradient is zero everywhere, so there is nothing to compare"
    return ""


def _chunks(
    tensors: Sequence[Tensor | None], kind: torch.dtype = torch.float32
) -> Iterator[list[Tensor]]:
    """Pieces of tensors of one shape, flat and of one type; a missing one is zero."""
    length = max(0 if tensor is None else tensor.numel() for tensor in tensors)
    flat = [torch.zeros(1) if t is None else t.flatten() for t in tensors]
    for start in range(0, length, CHUNK):
        size = min(CHUNK, length - start)
        yield [
            torch.zeros(size, dtype=kind) if tensor is None else part[start : start + size].to(kind)
            for tensor, part in zip(tensors, flat, strict=True)
        ]


def judged(rows: list[Row], tolerance: float = TOLERANCE) -> Comparison:
    """What parameters have in common.

    Equal: the error is within the tolerance, of every parameter within ten times that. Scaled: it
    is so once the gradient is divided by the ratio. Different: neither, or not a number.
    """
    got, wanted = _norm(row.got for row in rows), _norm(row.wanted for row in rows)
    ratio, cosine = _ratio_and_cosine(got, wanted, sum(row.dot for row in rows))
    error = _norm(row.gap for row in rows) / (wanted or 1.0)
    least = SMALL * max(got, wanted)
    large = [row for row in rows if max(row.got, row.wanted) > least]
    lengths = [[n if n > least else 0.0 for n in (row.got, row.wanted)] for row in large]
    each = [
        Worst(row.name, *_ratio_and_cosine(a, b, row.dot))
        for row, (a, b) in zip(large, lengths, strict=True)
    ]
    each.sort(key=lambda w: -abs(w.ratio - 1) - abs(w.cosine - 1))
    kind: Kind = "different"
    if error <= tolerance and all(row.gap <= 10 * tolerance * (row.wanted or 1.0) for row in large):
        kind = "equal"
    elif (
        error < math.inf
        and _angle(cosine) <= tolerance
        and all(_angle(w.cosine) + abs(w.ratio / ratio - 1) <= 10 * tolerance for w in each)
    ):
        kind = "scaled"
    return Comparison(kind, ratio, cosine, error, each, rows)


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def _angle(cosine: float) -> float:
    """The distance of two directions: the error that is left when the lengths are made equal."""
    return math.sqrt(max(0.0, 2 * (1 - cosine)))


def _ratio_and_cosine(first: float, second: float, dot: float) -> tuple[float, float]:
    if not first or not second:
        return (1.0, 1.0) if first == second else (math.inf if first else 0.0, 0.0)
    return first / second, dot / (first * second)


def called(ratio: float, world: int) -> str | None:
    """What a factor is called in terms of W ranks; None if nothing fits."""
    names = {"W": world, "1/W": 1 / world, "W²": world**2, "1/W²": 1 / world**2}
    names |= {"√W": math.sqrt(world), "1/√W": 1 / math.sqrt(world)}
    fitting = [name for name, value in names.items() if abs(ratio / value - 1) < 5e-3]
    return fitting[0] if fitting and abs(ratio - 1) > 5e-3 else None


def shares(union: Gradients, ranks: Gradients, first: Gradients) -> tuple[float, float] | None:
    """How one process weighs the samples of ranks 0 and 1, relative to the ranks' equal weights.

    `union` is one process's gradient of both ranks' samples, `ranks` the average of the two ranks'
    gradients, and `first` the gradient of rank 0's samples. If each rank divides by a count of its
    own, `union` is a combination of the other two, and the weights add up to 1. None if it is not,
    or has the same weights.
    """
    keys = sorted(union)
    if not keys or not all(key in ranks and key in first for key in keys):
        return None
    products = torch.zeros(3, 3, dtype=torch.float64)  # of the three with one another
    for key in keys:
        for chunk in _chunks([ranks[key], first[key], union[key]], torch.float64):
            stacked = torch.stack(chunk)
            products += stacked @ stacked.T
    basis, wanted, square = products[:2, :2], products[:2, 2], products[2, 2]
    weights = torch.linalg.lstsq(basis, wanted[:, None], driver="gelsd").solution.flatten()
    left = square - 2 * weights @ wanted + weights @ basis @ weights
    if float(left) > (5 * TOLERANCE) ** 2 * float(square):
        return None
    of_second = float(weights[0]) / 2  # the average holds half of each
    of_first = of_second + float(weights[1])
    if abs(of_second - 0.5) <= 5 * TOLERANCE or abs(of_first + of_second - 1) > 5 * TOLERANCE:
        return None
    return of_first, of_second
