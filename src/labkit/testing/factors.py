"""By what must a loss be multiplied? Try 1, W, and 1/W on real ranks, against one process.

    def loss(outputs, targets):          # what a rank back-propagates, from its own samples
        return F.mse_loss(outputs, targets, reduction="sum") / 24

    experiment = Experiment(model, inputs, targets, average_gradients)
    print(factor_table(try_factors(experiment, loss, meant=F.mse_loss)))

`meant` is the loss of one process that has every sample. A loss may call collectives.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from labkit.book.tables import table
from labkit.launch.ranks import run_ranks
from labkit.testing.compare import Comparison, gradients, ratio_and_cosine, same_bits
from labkit.testing.verdict import gradient_of

Loss = Callable[[Tensor, Tensor], Tensor]


class Experiment(NamedTuple):
    """What stays the same while losses and factors are tried.

    Attributes:
        model: called as `model(inputs)`.
        inputs: every sample, (N, …).
        targets: one per sample, (N, …).
        combine: called on every rank after backward; combines the gradients of its argument.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    combine: Callable[[nn.Module], None]


def try_factors(
    experiment: Experiment, loss: Loss, meant: Loss, counts: Sequence[int] = (3, 3)
) -> dict[str, Comparison]:
    """The combined gradient of `factor · loss`, compared with `meant`'s, for "×1", "×W", "×1/W".

    Rank r has the next `counts[r]` samples; `loss` gets its outputs and targets there. Raises
    RuntimeError if the ranks end with different bits, and ValueError if the true or a combined
    gradient is zero everywhere.

    Costs three starts of W ranks, about 0.1 s each.
    """
    model, inputs, targets, combine = experiment
    world_size = len(counts)
    true = gradient_of(model, lambda alone: meant(alone(inputs), targets))

    def on_a_rank(rank: int, factor: float) -> list[Tensor]:
        outputs = model(inputs.split(list(counts))[rank])
        (factor * loss(outputs, targets.split(list(counts))[rank])).backward()
        combine(model)
        return gradients(model)

    found = {}
    for name, factor in (("×1", 1.0), ("×W", world_size), ("×1/W", 1 / world_size)):
        first, *others = run_ranks(on_a_rank, world_size, factor)
        if not all(same_bits(first, other) for other in others):
            raise RuntimeError(f"{name}: the ranks hold different gradients after `combine`")
        found[name] = ratio_and_cosine(first, true)
    return found


def is_right(comparison: Comparison) -> bool:
    """Ratio and cosine are 1 up to rounding in float32."""
    return abs(comparison.ratio - 1) < 1e-5 and comparison.cosine > 1 - 1e-9


def factor_table(found: Mapping[str, Comparison]) -> str:
    """One row: the ratio with each factor, the cosine, and the factor that is right, or none.

    The cosine is the one of the first factor: a positive factor does not change it.
    """
    cosine = next(iter(found.values())).cosine
    right = [name for name, comparison in found.items() if is_right(comparison)]
    headers = [*(f"ratio, {name}" for name in found), "cosine", "right"]
    ratios = [comparison.ratio for comparison in found.values()]
    return table(headers, [[*ratios, cosine, ", ".join(right) or "none"]])
