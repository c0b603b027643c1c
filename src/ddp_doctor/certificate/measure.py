"""Two gradients side by side: ratio, cosine, the worst parameter, and what the ratio is called."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_doctor.facts.certificate import Worst

Gradients = Mapping[str, Tensor]
TOLERANCE = 1e-3  # relative; float32 sums in another order stay far below it
HALF = 5e-3  # relative; where half precision takes part, which rounds each element
SMALL = 1e-5  # a parameter whose gradient is below this part of the whole gradient is not judged


@dataclass(frozen=True)
class Comparison:
    """`got` against `wanted`. `error` is ‖got − wanted‖ / ‖wanted‖; `kind` what follows from it."""

    kind: str  # equal, scaled, different
    ratio: float
    cosine: float
    error: float
    worst: Worst | None


def compare(
    got: Gradients, wanted: Gradients, names: Mapping[str, str], tolerance: float = TOLERANCE
) -> Comparison:
    """Compare over all parameters and per parameter. A missing gradient counts as zero.

    Equal: the error is within the tolerance, of every parameter within ten times that. Scaled: it
    is so once the gradient is divided by the ratio. Raises ValueError if shapes differ. Cost: one
    pass over both.
    """
    if any(got[key].shape != wanted[key].shape for key in got.keys() & wanted.keys()):
        raise ValueError("the two gradients are of different shapes")
    rows = []
    for key in sorted(got.keys() | wanted.keys()):
        there = got.get(key, wanted.get(key))
        assert there is not None
        ours = got.get(key, torch.zeros_like(there)).double().flatten()
        other = wanted.get(key, torch.zeros_like(there)).double().flatten()
        dot, gap = float(ours @ other), float((ours - other).norm())
        rows.append((names.get(key, key), float(ours.norm()), float(other.norm()), dot, gap))
    first, second = _norm(row[1] for row in rows), _norm(row[2] for row in rows)
    ratio, cosine = _ratio_and_cosine(first, second, sum(row[3] for row in rows))
    error = _norm(row[4] for row in rows) / (second or 1.0)
    judged = [row for row in rows if max(row[1], row[2]) > SMALL * max(first, second)]
    each = [Worst(row[0], *_ratio_and_cosine(*row[1:4])) for row in judged]
    worst = max(each, key=lambda one: abs(one.ratio - 1) + abs(one.cosine - 1), default=None)
    gaps = [row[4] / (row[2] or 1.0) for row in judged]
    if error <= tolerance and max(gaps, default=0.0) <= 10 * tolerance:
        kind = "equal"
    elif _angle(cosine) <= tolerance and all(
        _angle(one.cosine) + abs(one.ratio / ratio - 1) <= 10 * tolerance for one in each
    ):
        kind = "scaled"
    else:
        kind = "different"
    return Comparison(kind, ratio, cosine, error, worst)


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
    u, r, f = (torch.cat([g[k].double().flatten() for k in keys]) for g in (union, ranks, first))
    basis = torch.stack([r, f], dim=1)
    weights = torch.linalg.lstsq(basis, u[:, None], driver="gelsd").solution.flatten()
    if float((basis @ weights - u).norm()) > 5 * TOLERANCE * float(u.norm()):
        return None
    second = float(weights[0]) / 2  # the average holds half of each
    one = second + float(weights[1])
    if abs(second - 0.5) <= 5 * TOLERANCE or abs(one + second - 1) > 5 * TOLERANCE:
        return None
    return one, second
