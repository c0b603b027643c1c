"""For museum.ipynb: every exhibit, trained, put to the invariants and to a reader's
tests.

Each function starts its own ranks, and returns what was found by the exhibit's name.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from labkit.launch import run_ranks
from labkit.testing import museum, ratio_and_cosine, trial
from labkit.testing.compare import Comparison, gradients
from labkit.testing.invariants import (
    INVARIANTS,
    communication_overlaps_backward,
    violations,
)

Data = Sequence[Sequence[trial.MicroBatch]]
Test = Callable[[trial.Wrap, int, int], None]
_ROUNDING = 1e-9  # far above float64's rounding error, far below every exhibit's


class Curve(NamedTuple):
    """A training: the ranks' mean loss per step, and whether a gradient was wrong."""

    losses: list[float]
    gradient_was_wrong: bool


def mean_loss(module: nn.Module, batches: Sequence[trial.MicroBatch]) -> float:
    """The mean of the losses of all items in `batches`."""
    with torch.no_grad():
        losses = [trial.item_losses(module(b.inputs), b.targets) for b in batches]
    return torch.cat(losses).mean().item()


def loss_curves(steps: int) -> dict[str, Curve]:
    """Train each exhibit on two ranks with Adam; "one process" has the full batch.

    A gradient is wrong if it differs from the full batch's gradient at the same weights
    by more than rounding, in any step and on any rank.
    """
    data = trial.draw_batches(2)
    of_ranks = run_ranks(_train_all, 2, steps, timeout=240, device="cpu")
    curves = {"one process": run_ranks(_train_alone, 1, steps, data, device="cpu")[0]}
    for name in of_ranks[0]:
        found = [one[name] for one in of_ranks]
        losses = [
            sum(step) / 2 for step in zip(*(f.losses for f in found), strict=True)
        ]
        curves[name] = Curve(losses, any(f.gradient_was_wrong for f in found))
    return curves


def crosses() -> dict[str, dict[str, Comparison | None]]:
    """Per exhibit the invariants that it violates, with ratio and cosine if they exist.

    An exhibit runs on as many ranks as its label asks for. Overlap is asked only of the
    exhibit that is about overlap. Raises RuntimeError if ranks disagree about the
    invariants.
    """
    caught: dict[str, dict[str, Comparison | None]] = {}
    for world_size in sorted({e.ranks_needed for e in museum.exhibits()}):
        of_ranks = run_ranks(_violations, world_size, timeout=240, device="cpu")
        for name, found in of_ranks[0].items():
            if any(list(one[name]) != list(found) for one in of_ranks):
                raise RuntimeError(f"the ranks disagree about the invariants of {name}")
        caught |= of_ranks[0]
    return {e.name: caught[e.name] for e in museum.exhibits()}


def caught_by(tests: Sequence[Test]) -> dict[str, set[str]]:
    """For each of `tests`, the exhibits for which it fails on at least one of two
    ranks.

    A test is called on every rank as `test(wrap, rank, world_size)`, and fails by
    AssertionError.
    """
    of_ranks = run_ranks(_failures, 2, tests, timeout=240, device="cpu")
    return {
        t.__name__: set().union(*(one[t.__name__] for one in of_ranks)) for t in tests
    }


def _train_all(rank: int, world_size: int, steps: int) -> dict[str, Curve]:
    data = trial.draw_batches(world_size)
    return {e.name: _train(e.wrap, data, rank, steps) for e in museum.exhibits()}


def _train(wrap: trial.Wrap, data: Data, rank: int, steps: int) -> Curve:
    module = trial.SmallModule()
    wrapped = wrap(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    losses, wrong = [], False
    for _ in range(steps):
        oracle = trial.SmallModule()
        oracle.load_state_dict(module.state_dict())
        trial.full_batch_step(oracle, data)
        trial.step(wrapped, module, data, rank)
        ratio, cosine = ratio_and_cosine(gradients(module), gradients(oracle))
        wrong = wrong or abs(ratio - 1) > _ROUNDING or 1 - cosine > _ROUNDING
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss(module, data[rank]))
    return Curve(losses, wrong)


def _train_alone(steps: int, data: Data) -> Curve:
    module, losses = trial.SmallModule(), []
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(steps):
        trial.full_batch_step(module, data)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss(module, [batch for one in data for batch in one]))
    return Curve(losses, gradient_was_wrong=False)


def _violations(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for exhibit in museum.exhibits():
        if exhibit.ranks_needed == world_size:
            checks = list(INVARIANTS)
            if exhibit.bug == "no overlap":
                checks.append(communication_overlaps_backward)
            errors = violations(exhibit.wrap, invariants=checks)
            found[exhibit.name] = {name: e.comparison for name, e in errors.items()}
    return found


def _failures(
    rank: int, world_size: int, tests: Sequence[Test]
) -> dict[str, list[str]]:
    failed: dict[str, list[str]] = {test.__name__: [] for test in tests}
    for exhibit in museum.exhibits():
        for test in tests:
            try:
                test(exhibit.wrap, rank, world_size)
            except AssertionError:
                failed[test.__name__].append(exhibit.name)
    return failed
