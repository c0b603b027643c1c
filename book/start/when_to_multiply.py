"""For when_to_multiply.ipynb: one loss with three factors.

    def loss(outputs, targets):  # what a rank back-propagates, from its own samples
        return F.mse_loss(outputs, targets, reduction="sum") / 24

    experiment = Experiment(model, inputs, targets, average_gradients)
    print(factor_table(try_factors(experiment, loss, meant=F.mse_loss)))

`meant` is the loss of one process that has every sample. A loss may call collectives.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from labkit.book import table
from labkit.testing import gradient_of, try_variants
from labkit.testing.compare import Comparison

Loss = Callable[[Tensor, Tensor], Tensor]


class Experiment(NamedTuple):
    """What stays the same while losses and factors are tried.

    Attributes:
        model: called as `model(inputs)`.
        inputs: every sample, (N, …).
        targets: one per sample, (N, …).
        combine: called on every rank after backward; combines the gradients of its
            argument.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    combine: Callable[[nn.Module], None]


def try_factors(
    experiment: Experiment, loss: Loss, meant: Loss, counts: Sequence[int] = (3, 3)
) -> dict[str, Comparison]:
    """The combined gradient of `loss`, times 1, W, and 1/W, compared with `meant`'s.

    Rank r has the next `counts[r]` samples; `loss` gets its outputs and targets there.
    Raises RuntimeError if the ranks end with different bits.
    """
    model, inputs, targets, combine = experiment

    def with_factor(factor: float) -> Callable[[nn.Module, slice], None]:
        def variant(module: nn.Module, rows: slice) -> None:
            (factor * loss(module(inputs[rows]), targets[rows])).backward()
            combine(module)

        return variant

    factors = {"×1": 1.0, "×W": len(counts), "×1/W": 1 / len(counts)}
    variants = {name: with_factor(factor) for name, factor in factors.items()}
    truth = gradient_of(model, lambda alone: meant(alone(inputs), targets))
    judged = try_variants(model, variants, truth, counts)
    if any(verdict.ranks != "all" for verdict in judged):
        raise RuntimeError("the ranks hold different gradients after `combine`")
    return {verdict.variant: verdict.comparison for verdict in judged}


def factor_table(found: Mapping[str, Comparison]) -> str:
    """One row: the ratio with each factor, the cosine, and the factor that is right.

    Right is a ratio and a cosine of 1 up to rounding in float32. The cosine is the one
    of the first factor: a positive factor does not change it.
    """
    cosine = next(iter(found.values())).cosine
    right = [
        name
        for name, one in found.items()
        if abs(one.ratio - 1) < 1e-5 and one.cosine > 1 - 1e-9
    ]
    headers = [*(f"ratio, {name}" for name in found), "cosine", "right"]
    ratios = [comparison.ratio for comparison in found.values()]
    return table(headers, [[*ratios, cosine, ", ".join(right) or "none"]])
