"""A finding, and the catalog of codes: title, severity, page of the book. The one place for it.

An error or a warning is *measured*: replicas differ, an optimizer gets another gradient than the
average of what the ranks computed, data or learning rates differ, a rank waits. What is only
*recognized*, as a factor in the source, is a hint, and predicts what a certificate would measure.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeVar

Severity = Literal["error", "warning", "hint", "note"]
ORDER: dict[str, int] = {"error": 0, "warning": 1, "hint": 2, "note": 3}

# Pages, as files in the project's folder, with the label of a section.
MULTIPLY = "book/start/when_to_multiply.ipynb"
ACCUMULATE = "book/puzzles/accumulate_vs_ddp.ipynb"
BYPASSED = "book/puzzles/bypassed_wrapper.ipynb"
BY_HAND = "book/puzzles/by_hand_or_ddp.ipynb"
MEANS = "book/puzzles/mean_of_means.ipynb"
SUMS = "book/puzzles/sum_or_average.ipynb"
STEP = "book/surprises/in_the_step.ipynb"
WRAPPER = "book/build/the_wrapper.ipynb"
DATA = "book/surprises/in_the_data.ipynb"
LOSS = "book/surprises/in_the_loss.ipynb"
FAILS = "book/scale/two_nodes.ipynb"
PIECES = "book/scale/in_pieces.ipynb"
REPORTS = "book/reference/symptoms.md"


def to_read(page: str) -> str:
    """The page's file, if the book lies beside this package; else its published address, or "".

    The address is that of the link "Book" in the distribution's metadata, once there is one.
    """
    if (Path(__file__).parents[3] / page).is_file():
        return page
    try:
        links = metadata.metadata("ddp-doctor").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        links = []
    site = next((link.removeprefix("Book, ") for link in links if link.startswith("Book, ")), "")
    name = page.removeprefix("book/").rpartition(".")[0]
    return f"{site.rstrip('/')}/{name}.html" if site else ""


# code: (severity unless the rule says otherwise, title, page)
CATALOG: dict[str, tuple[Severity, str, str]] = {
    "wrapper_bypassed": ("error", "The forward bypasses the wrapper", BYPASSED),
    "two_backwards": ("error", "Two backwards run through one forward", STEP),
    "wrapper_lost": ("error", "The ranks' gradients are not combined", BYPASSED),
    "model_changed_after_wrapping": ("error", "The model changed after it was wrapped", BYPASSED),
    "optimizer_on_other_parameters": ("error", "The optimizer holds other parameters", REPORTS),
    "optimizer_in_backward": ("error", "The optimizer steps before the average", STEP),
    "parameters_averaged": ("warning", "Parameters are averaged instead of gradients", PIECES),
    "world_size_one": ("error", "The run is not distributed", ACCUMULATE),
    "unequal_denominators": ("hint", "Ranks take means over different numbers of items", MEANS),
    "unequal_denominators_accumulation": (
        "hint",
        "Micro-batches take means over different numbers of items",
        MEANS,
    ),
    "missing_world_size_factor": ("hint", "The loss lacks a factor of the world size", MULTIPLY),
    "scaled_by_world_size": ("hint", "A factor of the world size is applied twice", MULTIPLY),
    "loss_reduced_before_backward": ("hint", "The loss is all-reduced before backward", LOSS),
    "loss_not_divided_by_accumulation": (
        "hint",
        "The means of the micro-batches are added",
        ACCUMULATE,
    ),
    "gather_without_gradient": ("hint", "The gathered features carry no gradient", LOSS),
    "own_reduction_sums": ("hint", "The optimizer gets the sum over the ranks", SUMS),
    "other_than_average": ("error", "The optimizer gets another gradient than the average", STEP),
    "last_micro_batch_unsynced": ("error", "The last micro-batch is not synchronized", WRAPPER),
    "rank_skipped_step": ("error", "A rank took fewer optimizer steps", STEP),
    "clipped_before_sync": ("error", "Gradients are clipped before they are averaged", STEP),
    "clipped_local_shards": ("error", "The norm covers only the local shards", PIECES),
    "manual_all_reduce_skips_none": (
        "error",
        "The all-reduce skips gradients that are None on some ranks",
        BY_HAND,
    ),
    "scaler_scales_differ": ("error", "The ranks' loss scales differ", STEP),
    "scheduler_steps_per_rank": ("warning", "The scheduler steps once per rank", STEP),
    "replicas_differ_at_start": ("error", "The replicas differ before the first step", BYPASSED),
    "replicas_drift": ("error", "The replicas diverge", BYPASSED),
    "hyperparameters_differ": ("error", "The ranks' hyperparameters differ", STEP),
    "buffers_differ": ("warning", "Buffers differ between the ranks", DATA),
    "same_data_on_ranks": ("error", "Ranks train on the same data", DATA),
    "datasets_differ": ("error", "The ranks' datasets differ", ACCUMULATE),
    "sampler_seeds_differ": ("error", "The ranks' samplers shuffle differently", DATA),
    "epoch_order_repeats": ("warning", "Every epoch has the same order", DATA),
    "hang_missing_rank": ("error", "Ranks wait for a missing rank", FAILS),
    "mismatched_collectives": ("error", "Ranks are in different collectives", FAILS),
}

HANGS = {"hang_missing_rank", "mismatched_collectives"}
MICRO_BATCHES = "the number of micro-batches"


@dataclass(frozen=True)
class Prediction:
    """What a certificate has to measure if a hint names the cause; `said` is the same in words.

    `ratio`: the gradient's length relative to that of one process. `shares`: one process's weight
    of each rank's samples, where the ranks' average has 1/W. Neither: a gradient that is not equal.
    `undivided`: nothing divides the loss, so that its ratio is known though it is a sum. `outside`:
    what of it no certificate measures; empty if one does.
    """

    said: str
    ratio: float | None = None
    shares: tuple[float, ...] = ()
    undivided: bool = False
    outside: str = ""


@dataclass(frozen=True)
class Finding:
    """What is wrong, the numbers that show it, where, and the line to write.

    `predicts`: of a hint. `answer`: what a certificate says of the prediction.
    """

    code: str
    evidence: str
    where: str
    fix: str
    severity: Severity
    title: str
    page: str
    predicts: Prediction | None = None
    answer: str = ""


def finding(
    code: str,
    evidence: str,
    where: str,
    fix: str,
    severity: Severity | None = None,
    predicts: Prediction | None = None,
) -> Finding:
    """A finding with the catalog's title, page and, unless given, severity."""
    usual, title, page = CATALOG[code]
    return Finding(code, evidence, where, fix, severity or usual, title, page, predicts)


Rule = TypeVar("Rule", bound=Callable[..., Iterable[Finding]])
RULES: dict[str, Callable[..., Iterable[Finding]]] = {}  # by code, in the order of the report


def rule(*codes: str) -> Callable[[Rule], Rule]:
    """Register a rule with the codes that it raises. Its docstring is what `explain` prints."""

    def register(function: Rule) -> Rule:
        for code in codes:
            if code not in CATALOG or code in RULES:
                raise ValueError(f"{code!r} is not in the catalog, or has another rule")
            RULES[code] = function
        return function

    return register
