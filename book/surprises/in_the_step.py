"""For in_the_step.ipynb.

1. A few steps of training, to compare how far the weights have moved; with a loss
scaler.
2. A model in which a rank may leave out a branch, and what DDP's error says about it.
3. One gradient, averaged in half precision at many magnitudes and in two orders.
4. Two figures of a step.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.book import figures
from labkit.launch.ranks import run_ranks
from labkit.scenarios.rare_samples import EVERY_ROW, Problem
from labkit.testing.compare import flatten
from labkit.testing.variants import Held
from labkit.testing.verdict import Verdict, gradient_of, moved, verdicts, weights

BAD_STEP = 1  # the second of three


def trained(
    module: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: Optimizer,
    steps: int,
    after_step: Callable[[int], None] = lambda _: None,
) -> list[Tensor]:
    """Take `steps` steps on `loss()`; return how far each parameter of `module` has
    moved.

    `after_step` is called with the number of steps taken, from 1.
    """
    start = weights(module)
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        after_step(number)
    return moved(module, start)


def average_weights(module: nn.Module) -> None:
    """Replace each parameter by its mean over the ranks of the default group."""
    for parameter in module.parameters():
        parameter.data /= dist.get_world_size()
        dist.all_reduce(parameter.data)


def scaled_steps(
    problem: Problem,
    module: nn.Module,
    rows: slice = EVERY_ROW,
    forward: nn.Module | None = None,
    before_step: Callable[[torch.amp.GradScaler, Optimizer], None] = lambda *_: None,
) -> Held:
    """Three steps with a `GradScaler` in float16, with one broken label in the second.

    The label of the last sample overflows float16, so the gradient of the rank that
    holds it is infinite. `forward` is what is called (a wrapper of `module`; `module`
    itself when None), and `before_step` runs between the backward and `scaler.step`.

    Returns how far the weights have moved, with the scale at the end and which steps
    were taken as notes.
    """
    start, taken = weights(module), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: taken.append(number))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for number in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = (forward or module)(problem.inputs[rows])
        labels = problem.targets.clone()
        if number == BAD_STEP:
            labels[-1] = 1e6
        scaler.scale(F.mse_loss(outputs.float(), labels[rows])).backward()
        before_step(scaler, optimizer)
        scaler.step(optimizer)  # not taken if it finds an infinity or a NaN
        scaler.update()
    return Held(
        moved(module, start), (int(scaler.get_scale()), *(n in taken for n in range(3)))
    )


class TwoBranches(nn.Module):
    """Inputs (B, 6) → (B, 1). Samples with a mean above 1 also use `right`.

    A batch without such a sample gives `right` no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.body = nn.Linear(6, 8)
            self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        outputs = self.left(hidden)
        rare = x.mean(1, keepdim=True) > 1
        if rare.any():
            outputs = outputs + rare * self.right(hidden)
        return outputs


def headline(error: Exception) -> str:
    """The first sentence of DDP's error, and the parameters that it names, sorted."""
    text = str(error)
    names = re.search(
        r"Parameters which did not receive grad for (rank \d+): (.*)", text
    )
    first = text.split(". ")[0].split(" in the prior")[0]
    if not names:
        return first
    return f"{first}\n{names[1]} lacks {', '.join(sorted(names[2].split(', ')))}"


# Powers of two: multiplying by them changes no digit of a gradient in float32.
FACTORS = [2.0**power for power in range(-30, 19)]
SHOWN = {"tiny": 2.0**-26, "plain": 1.0, "large": 2.0**12}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ORDERS = ("divided before the sum", "divided after the sum")


def pull_together(problem: Problem) -> Problem:
    """The same problem early in training: targets are far off, so all ranks pull one
    way.
    """
    far = torch.where(problem.targets > 3, problem.targets, problem.targets + 4)
    return Problem(problem.model, problem.inputs, far)


def swept(problem: Problem, world_size: int = 4) -> list[Verdict]:
    """Average each factor times the gradient, per dtype and order; divide it out again.

    A verdict's `variant` is "bf16, divided before the sum" and so on, followed by the
    factor: a pair. Costs one all-reduce per dtype, order and factor.
    """
    truth = flatten(gradient_of(problem.model, problem.loss)).float()
    return verdicts(run_ranks(_on_this_rank, world_size, problem), [truth])


def picked(sweep: list[Verdict]) -> list[Verdict]:
    """Of a sweep, the three magnitudes that a table shows, with readable names."""
    return [
        verdict._replace(variant=f"{size}: {verdict.variant[0]}")
        for size, factor in SHOWN.items()
        for verdict in sweep
        if verdict.variant[1] == factor
    ]


def drawn(problem: Problem, sweep: list[Verdict]) -> Figure:
    """Ratio against the gradient's largest element; what is infinite lies at the
    top.
    """
    largest = flatten(gradient_of(problem.model, problem.loss)).abs().max().item()
    figure, axes = plt.subplots()
    for number, name in enumerate(dict.fromkeys(v.variant[0] for v in sweep)):
        ratios = [min(v.comparison.ratio, 1.6) for v in sweep if v.variant[0] == name]
        style = "-" if "before" in name else "--"
        color = figures.RANKS[number]
        axes.plot(
            [f * largest for f in FACTORS], ratios, style, lw=2, color=color, label=name
        )
    axes.set(
        xscale="log",
        xlabel="largest element of the gradient",
        ylabel="ratio (infinite: at the top)",
        ylim=(-0.05, 1.65),
    )
    axes.legend(loc="lower center", fontsize=8)
    return figure


def _on_this_rank(
    rank: int, world_size: int, problem: Problem
) -> dict[tuple[str, float], list[Tensor]]:
    rows = problem.rows(rank, world_size)
    own = flatten(
        gradient_of(problem.model, lambda module: problem.loss(module, rows))
    ).float()
    found = {}
    for name, dtype in DTYPES.items():
        for order in ORDERS:
            for factor in FACTORS:
                sent = (own * factor).to(dtype)
                if order == ORDERS[0]:
                    sent /= world_size
                dist.all_reduce(sent)
                if order == ORDERS[1]:
                    sent /= world_size
                found[f"{name}, {order}", factor] = [sent.float() / factor]
    return found


_LOCAL, _AVERAGED = figures.RANKS[1], figures.RANKS[0]


def step_map(phases: Sequence[tuple[str, bool | None, Sequence[str]]]) -> Figure:
    """A training step from top to bottom, and what may go wrong in each phase.

    Args:
        phases: name; whether the gradient is averaged in it (None: there is no gradient
            yet); and what may go wrong there.
    """
    lines = sum(max(1, len(surprises)) for _, _, surprises in phases)
    figure, axes = plt.subplots(figsize=(6.4, 0.5 + 0.3 * lines))
    top = 0.0
    for name, averaged, surprises in phases:
        height = max(1, len(surprises))
        color = {None: "#999999", False: _LOCAL, True: _AVERAGED}[averaged]
        axes.add_patch(
            Rectangle((0, top + 0.08), 2.7, height - 0.16, color=color, alpha=0.25)
        )
        axes.text(0.12, top + height / 2, name, va="center", fontsize=10)
        for number, surprise in enumerate(surprises):
            axes.text(2.9, top + number + 0.5, surprise, va="center", fontsize=9)
        top += height
    axes.text(0, -0.35, "orange: this rank's own gradient", color="#9a6a00", fontsize=9)
    right = "blue: the average, equal on every rank"
    axes.text(2.9, -0.35, right, color=_AVERAGED, fontsize=9)
    axes.set(xlim=(-0.1, 8), ylim=(top + 0.1, -0.8))
    axes.axis("off")
    return figure


def no_sync_timeline(
    placements: Mapping[str, Sequence[tuple[bool, bool, bool]]],
) -> Figure:
    """Per placement of `no_sync`, its micro-batches as forward and backward boxes.

    Args:
        placements: for each, one triple per micro-batch: whether its forward is under
            `no_sync`, whether its backward is, and whether an all-reduce was launched
            in that backward.
    """
    figure, _ = plt.subplots(
        len(placements), 1, figsize=(6.4, 0.95 * len(placements) + 0.3), sharex=True
    )
    for axes, (name, micro_batches) in zip(
        figure.axes, placements.items(), strict=True
    ):
        for number, (forward, backward, launched) in enumerate(micro_batches):
            _micro_batch(axes, 4.0 * number, number + 1, forward, backward, launched)
        axes.set(
            xlim=(-0.1, 4.0 * len(micro_batches)),
            ylim=(-0.75, 1.5),
            yticks=[],
            xticks=[],
        )
        axes.set_title(name, fontsize=10, pad=2)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.axes[-1].set_xlabel(
        "time → (gray: inside no_sync; blue: an all-reduce)", fontsize=9
    )
    return figure


def _micro_batch(
    axes: Axes, start: float, number: int, forward: bool, backward: bool, launched: bool
) -> None:
    for offset, width, inside, name in (
        (0.0, 1.3, forward, f"forward {number}"),
        (1.5, 2.0, backward, f"backward {number}"),
    ):
        left = start + offset
        if inside:
            gray = Rectangle(
                (left - 0.08, -0.12), width + 0.16, 1.24, color="#bbbbbb", lw=0
            )
            axes.add_patch(gray)
        axes.add_patch(
            Rectangle((left, 0), width, 1, facecolor="white", edgecolor="#444444")
        )
        axes.text(left + width / 2, 0.5, name, ha="center", va="center", fontsize=9)
    if launched:
        axes.add_patch(Rectangle((start + 2.3, -0.6), 1.2, 0.4, color=_AVERAGED))
