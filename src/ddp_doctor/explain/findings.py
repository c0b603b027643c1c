"""A finding, and the catalog of codes: title, severity, page of the book. The one place for it.

An error or a warning is *measured*: replicas differ, an optimizer gets another gradient than the
average of what the ranks computed, data or learning rates differ, a rank waits. What is only
*recognized*, as a factor in the source, is a hint, however likely: no exit code depends on it.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "hint", "note"]
ORDER: dict[str, int] = {"error": 0, "warning": 1, "hint": 2, "note": 3}

# Pages, as files in the project's folder.
MULTIPLY = "book/start/when_to_multiply.ipynb"
ACCUMULATE = "book/puzzles/accumulate_vs_ddp.ipynb"
BYPASSED = "book/puzzles/bypassed_wrapper.ipynb"
BY_HAND = "book/puzzles/by_hand_or_ddp.ipynb"
MEANS = "book/puzzles/mean_of_means.ipynb"
SUMS = "book/puzzles/sum_or_average.ipynb"
STEP = "book/surprises/in_the_step.ipynb"
WRAPPER = "book/surprises/in_the_wrapper.ipynb"
DATA = "book/surprises/in_the_data.ipynb"
LOSS = "book/surprises/in_the_loss.ipynb"
FAILS = "book/scale/when_a_node_fails.ipynb"
SYMPTOMS = "book/reference/symptoms.md"
PIECES = "book/scale/in_pieces.ipynb"
GROUPS = "book/scale/over_which_group.ipynb"
REPORTS = "book/reference/reports.md"

# code: (severity unless the rule says otherwise, title, page)
CATALOG: dict[str, tuple[Severity, str, str]] = {
    "wrapper_bypassed": ("error", "The forward bypasses the wrapper", BYPASSED),
    "two_backwards": ("error", "Two backwards run through one forward", WRAPPER),
    "wrapper_lost": ("error", "No wrapper combines the gradients", BYPASSED),
    "model_changed_after_wrapping": ("error", "The model changed after it was wrapped", BYPASSED),
    "optimizer_on_other_parameters": ("error", "The optimizer holds other parameters", REPORTS),
    "optimizer_in_backward": ("error", "The optimizer steps before the average", STEP),
    "parameters_averaged": ("warning", "Parameters are averaged instead of gradients", STEP),
    "world_size_one": ("error", "The run is not distributed", ACCUMULATE),
    "unequal_denominators": ("hint", "Items weigh differently on different ranks", MEANS),
    "unequal_denominators_accumulation": (
        "hint",
        "Items weigh differently in different micro-batches",
        MEANS,
    ),
    "missing_world_size_factor": ("hint", "The loss lacks a factor of the world size", MULTIPLY),
    "scaled_by_world_size": ("hint", "The loss carries a factor of the world size", MULTIPLY),
    "loss_reduced_before_backward": ("hint", "The loss is all-reduced before backward", LOSS),
    "loss_not_divided_by_accumulation": (
        "hint",
        "The loss is not divided by the accumulation steps",
        ACCUMULATE,
    ),
    "loss_divided_twice": ("hint", "The loss is divided by the accumulation steps twice", STEP),
    "partial_window_divided_by_k": (
        "hint",
        "A partial accumulation window is divided by the full length",
        MEANS,
    ),
    "micro_batches_discarded": ("error", "zero_grad discards micro-batches", STEP),
    "gradients_not_cleared": ("error", "Gradients of earlier steps are added", STEP),
    "local_negatives": ("hint", "Each rank contrasts only its own samples", LOSS),
    "gather_without_gradient": ("hint", "The gathered features carry no gradient", LOSS),
    "own_reduction_sums": ("hint", "The all-reduce sums the gradients", SUMS),
    "other_than_average": ("error", "The optimizer gets another gradient than the average", STEP),
    "last_micro_batch_unsynced": ("error", "The last micro-batch is not synchronized", WRAPPER),
    "no_sync_without_forward": ("note", "no_sync has no effect", WRAPPER),
    "every_micro_batch_synced": ("note", "Every micro-batch is synchronized", ACCUMULATE),
    "rank_skipped_step": ("error", "A rank took fewer optimizer steps", STEP),
    "clipped_before_sync": ("error", "Gradients are clipped before they are averaged", STEP),
    "clipped_per_micro_batch": ("warning", "Gradients are clipped in every micro-batch", STEP),
    "clipped_before_unscale": ("warning", "Gradients are clipped before they are unscaled", STEP),
    "clipped_local_shards": ("error", "The norm covers only the local shards", PIECES),
    "manual_all_reduce_skips_none": (
        "error",
        "The all-reduce skips gradients that are None on some ranks",
        BY_HAND,
    ),
    "scaler_scales_differ": ("error", "The ranks' loss scales differ", STEP),
    "scheduler_steps_per_rank": ("warning", "The scheduler steps once per rank", STEP),
    "static_graph_with_no_sync": ("error", "static_graph conflicts with no_sync", WRAPPER),
    "replicas_differ_at_start": ("error", "The replicas differ before the first step", BYPASSED),
    "replicas_drift": ("error", "The replicas diverge", BYPASSED),
    "hyperparameters_differ": ("error", "The ranks' hyperparameters differ", STEP),
    "buffers_differ": ("warning", "Buffers differ between the ranks", DATA),
    "local_batch_norm": ("note", "BatchNorm uses each rank's own statistics", DATA),
    "same_data_on_ranks": ("error", "Ranks train on the same data", DATA),
    "datasets_differ": ("error", "The ranks' datasets differ", ACCUMULATE),
    "sampler_seeds_differ": ("error", "The ranks' samplers shuffle differently", DATA),
    "epoch_order_repeats": ("warning", "Every epoch has the same order", DATA),
    "same_random_numbers": ("note", "Ranks draw the same random numbers", DATA),
    "uneven_batches": ("error", "Ranks have different numbers of batches", DATA),
    "padded_evaluation": ("hint", "The evaluation counts some samples twice", DATA),
    "hang_missing_rank": ("error", "Ranks wait for a missing rank", FAILS),
    "mismatched_collectives": ("error", "Ranks are in different collectives", FAILS),
    "unused_parameters": ("error", "Parameters take no part in the loss", WRAPPER),
    "saved_tensor_overwritten": ("error", "A saved tensor was overwritten", SYMPTOMS),
}

HANGS = {"hang_missing_rank", "mismatched_collectives"}


@dataclass(frozen=True)
class Finding:
    """What is wrong, the numbers that show it, where, and the line to write."""

    code: str
    evidence: str
    where: str
    fix: str
    severity: Severity
    title: str
    page: str
    later: bool = False  # whether the first step, which a certificate measures, does not show it


def finding(
    code: str, evidence: str, where: str, fix: str, severity: Severity | None = None
) -> Finding:
    """A finding with the catalog's title, page and, unless given, severity."""
    usual, title, page = CATALOG[code]
    return Finding(code, evidence, where, fix, severity or usual, title, page)
