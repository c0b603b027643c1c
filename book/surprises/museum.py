"""For museum.ipynb: every exhibit, trained, put to the invariants and to a reader's
tests; and the figures, tables, and lists of what was found.

Functions that start ranks return what they found by the exhibit's name.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from matplotlib.figure import Figure
from torch import nn

from labkit.book import figures, table
from labkit.launch import run_ranks
from labkit.testing import museum, ratio_and_cosine, trial
from labkit.testing.compare import Comparison, gradients
from labkit.testing.invariants import INVARIANTS, violations
from labkit.testing.overlap import communication_overlaps_backward
from labkit.testing.watch import RecordedCollectives, late_collectives

Data = Sequence[Sequence[trial.MicroBatch]]
Test = Callable[[trial.Wrap, int, int], None]
CHECKS = (*INVARIANTS, communication_overlaps_backward)
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
    of_ranks = run_ranks(_train_all, 2, steps, timeout=900, device="cpu")
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
        of_ranks = run_ranks(_violations, world_size, timeout=900, device="cpu")
        for name, found in of_ranks[0].items():
            if any(list(one[name]) != list(found) for one in of_ranks):
                raise RuntimeError(f"the ranks disagree about the invariants of {name}")
        caught |= of_ranks[0]
    return {e.name: caught[e.name] for e in museum.exhibits()}


def drawn_curves(curves: Mapping[str, Curve]) -> Figure:
    """Four exhibits' losses, solid, beside those of one process, dashed."""
    figures.use()
    wrong = ("sum_instead_of_average", "own_loss_scale", "bypassed_wrapper")
    figure, panels = plt.subplots(2, 2, figsize=(5.8, 3.8), sharex=True, sharey=True)
    for axes, name in zip(panels.flat, (*wrong, "zeros_for_none"), strict=True):
        axes.plot(curves[name].losses, color=figures.WRONG, lw=2.2)
        axes.plot(curves["one process"].losses, color=figures.TRUTH, lw=1.2, ls="--")
        axes.set_title(name.replace("_", " "), fontsize=10)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("loss", fontsize=10)
    return figure


def table_of_curves(curves: Mapping[str, Curve]) -> str:
    """Per exhibit its kind of bug, whether a gradient was wrong, and two losses."""
    rows = []
    alone = curves["one process"].losses
    rows.append(["one process", "", "", alone[0], alone[-1]])
    for exhibit in museum.exhibits():
        losses, wrong = curves[exhibit.name]
        said = "yes" if wrong else "no"
        rows.append([exhibit.name, exhibit.bug, said, losses[0], losses[-1]])
    headers = ["", "bug", "gradient wrong here", "loss after step 1", "after step 25"]
    return table(headers, rows, digits=2)


def catalog() -> Markdown:
    """Every exhibit by its kind of bug: its title and, in italics, its symptom."""
    rooms = []
    for kind in sorted({exhibit.bug for exhibit in museum.exhibits()}):
        of_kind = [exhibit for exhibit in museum.exhibits() if exhibit.bug == kind]
        rooms.append(f"**{kind.capitalize()}** ({len(of_kind)})\n")
        for exhibit in of_kind:
            text = inspect.getdoc(exhibit.wrap) or ""
            said = next(p for p in text.split("\n\n") if p.startswith("Symptom: "))
            symptom = " ".join(said.removeprefix("Symptom: ").split())
            symptom = symptom[0].upper() + symptom[1:]
            rooms.append(f"**`{exhibit.name}`** {exhibit.title} *{symptom}*\n")
    return Markdown("\n".join(rooms))


def list_of_checks() -> Markdown:
    """Every check, with the first sentence of its docstring."""
    lines = []
    for check in CHECKS:
        summary = " ".join((check.__doc__ or "").split("\n\n")[0].split())
        lines.append(f"- `{check.__name__}`: {summary}")
    return Markdown("\n".join(lines))


def drawn_matrix(caught: Mapping[str, Mapping[str, Any]]) -> Figure:
    """`crosses` as a grid of exhibits and checks; a circle marks the label's check."""
    exhibits, names = museum.exhibits(), [check.__name__ for check in CHECKS]
    figure, axes = plt.subplots(figsize=(5.8, 8.2))
    for row, exhibit in enumerate(exhibits):
        for column, name in enumerate(names):
            if name in caught[exhibit.name]:
                axes.plot(column, row, "x", color=figures.WRONG, ms=7, mew=2)
            if name == exhibit.caught_by:
                axes.plot(column, row, "o", mfc="none", mec=figures.TRUTH, ms=13)
    axes.set_xticks(range(len(names)), [name.replace("_", " ") for name in names])
    labels = [exhibit.name.replace("_", " ") for exhibit in exhibits]
    axes.set_yticks(range(len(exhibits)), labels)
    axes.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=0, labelsize=9)
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(len(exhibits) - 0.4, -0.6))
    axes.grid(alpha=0.25)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def table_of_matrix(caught: Mapping[str, Mapping[str, Comparison | None]]) -> str:
    """`crosses` in numbers: per exhibit, those of its label's check, and the counts."""
    rows = []
    for exhibit in museum.exhibits():
        errors = caught[exhibit.name]
        known = [errors[exhibit.caught_by], *errors.values()]  # its label's first
        compared = next((c for c in known if c is not None), None)
        numbers = ("", "") if compared is None else map("{:.4f}".format, compared)
        rows.append([exhibit.name, exhibit.caught_by, *numbers, len(errors)])
    headers = ["exhibit", "its label: caught by", "ratio", "cosine", "crosses"]
    single = [name for name, errors in caught.items() if len(errors) == 1]
    obvious = {"gradients_equal_full_batch", "replicas_stay_identical"}
    missed = [name for name, errors in caught.items() if not obvious & set(errors)]
    return (
        f"{table(headers, rows)}\n"
        f"{len(INVARIANTS)} invariants, {len(caught)} exhibits\n"
        f"with a single cross: {len(single)}\n"
        f"missed by {' and '.join(sorted(obvious))}: {len(missed)}"
    )


def caught_by(tests: Sequence[Test]) -> dict[str, set[str]]:
    """For each of `tests`, the exhibits for which it fails on at least one of two
    ranks.

    A test is called on every rank as `test(wrap, rank, world_size)`, and fails by
    AssertionError.
    """
    of_ranks = run_ranks(_failures, 2, tests, timeout=900, device="cpu")
    return {
        t.__name__: set().union(*(one[t.__name__] for one in of_ranks)) for t in tests
    }


def after_a_loss_of_zero(
    wrap: trial.Wrap, rank: int, world_size: int
) -> dict[str, str]:
    """What is wrong after gradients of zero are clipped: a gradient that is None, a
    weight that has changed, or more bytes sent than those of each gradient, once.
    """
    module, [batch] = trial.SmallModule(), trial.draw_batches(world_size)[rank]
    wrapped, start = wrap(module), trial.SmallModule().state_dict()
    (0 * wrapped(batch.inputs).sum()).backward()
    once = sum(p.grad.nbytes for p in module.parameters())
    with RecordedCollectives() as watch:
        wrapped.finish_and_clip(1.0)
    sent = sum(one.bytes for one in watch.launched) / once
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            return {"zeros_stay": f"{name}.grad is None, and was zeros"}
        if not parameter.equal(start[name]):
            return {"weights_stay": f"{name} has changed"}
    return {"sent_once": f"{sent:.1f} times all gradients"} if sent > 1.5 else {}


def _train_all(rank: int, world_size: int, steps: int) -> dict[str, Curve]:
    data = trial.draw_batches(world_size)
    with late_collectives(check=False):  # as over a slow connection
        return {e.name: _train(e.wrap, data, rank, steps) for e in museum.exhibits()}


def _train(wrap: trial.Wrap, data: Data, rank: int, steps: int) -> Curve:
    module = trial.SmallModule()
    wrapped = wrap(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    oracle, losses, wrong = trial.SmallModule(), [], False
    for _ in range(steps):
        oracle.load_state_dict(module.state_dict())
        oracle.zero_grad()
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
                with late_collectives(check=False):
                    test(exhibit.wrap, rank, world_size)
            except AssertionError:
                failed[test.__name__].append(exhibit.name)
    return failed
