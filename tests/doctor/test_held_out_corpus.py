"""The held-out corpus is what its headers say: complete, well-formed, and measured."""

import json

import pytest
from doctor import measure_held_out as measure

STORED = json.loads(measure.STORED.read_text())
SCRIPTS = {path.stem: path for path in measure.scripts()}
BROKEN = sorted(name for name, path in SCRIPTS.items() if path.parent.name == "broken")
CORRECT = sorted(name for name, path in SCRIPTS.items() if path.parent.name == "correct")

# One whose factor is exact, one whose replicas diverge, one that is right.
MEASURED_AGAIN = ("masked_recsys", "fused_backward", "tagger_global_count")

CODES = {
    *("wrapper_bypassed", "wrapper_lost", "model_changed_after_wrapping"),
    *("optimizer_on_other_parameters", "hooks_lost", "optimizer_in_backward"),
    *("parameters_averaged", "world_size_one"),
    *("unequal_denominators", "unequal_denominators_accumulation", "missing_world_size_factor"),
    *("scaled_by_world_size", "loss_reduced_before_backward", "loss_not_divided_by_accumulation"),
    *("loss_divided_twice", "micro_batches_discarded", "gradients_not_cleared"),
    *("partial_window_divided_by_k", "local_negatives"),
    *("gather_without_gradient", "own_reduction_sums"),
    *("last_micro_batch_unsynced", "every_micro_batch_synced", "rank_skipped_step"),
    *("clipped_before_sync", "clipped_per_micro_batch", "clipped_local_shards"),
    *("manual_all_reduce_skips_none", "scaler_scales_differ", "scheduler_steps_per_rank"),
    *("logged_value_is_local", "static_graph_with_no_sync"),
    *("replicas_differ_at_start", "replicas_drift", "buffers_differ", "local_batch_norm"),
    *("same_data_on_ranks", "datasets_differ", "epoch_order_repeats", "same_random_numbers"),
    *("uneven_batches", "padded_evaluation", "hang_missing_rank", "mismatched_collectives"),
    *("find_unused_without_need", "unused_parameters", "one_bucket", "saved_tensor_overwritten"),
}


def is_right(result: dict) -> bool:
    """Whether the numbers show no fault: the gradient within the rounding of bfloat16."""
    return (
        result["exit_code"] == 0
        and result.get("replicas_equal", True)
        and all(abs(ratio - 1) < 5e-3 for ratio in result.get("ratio", []))
        and all(cosine > 0.9999 for cosine in result.get("cosine", []))
        and result.get("run") == result.get("right")
    )


def test_there_are_enough_scripts_and_each_has_been_measured():
    assert len(BROKEN) >= 24
    assert len(CORRECT) >= 20
    assert set(STORED) == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_header_names_known_codes_and_the_measured_numbers(name):
    header = measure.Header.of(SCRIPTS[name])
    assert set(header.expected) <= CODES
    assert set(header.accepted) <= CODES
    assert not set(header.expected) & set(header.accepted)
    assert header.launch in {"torchrun", "python"}
    assert header.measured == measure.describe(STORED[name])
    assert bool(header.expected) == (name in BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_the_numbers_of_a_broken_script_show_a_fault(name):
    assert not is_right(STORED[name])


@pytest.mark.parametrize("name", CORRECT)
def test_the_numbers_of_a_correct_script_show_none(name):
    assert is_right(STORED[name])


@pytest.mark.parametrize("name", MEASURED_AGAIN)
def test_a_script_measures_the_same_again(name):
    result, stored = measure.measure(name), STORED[name]
    assert result.keys() == stored.keys()
    for key, value in stored.items():
        assert result[key] == (
            pytest.approx(value, rel=1e-2) if isinstance(value, float | list) else value
        )
