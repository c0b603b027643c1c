"""Simulated steps of models that nobody has timed, and how they are drawn."""

import matplotlib.pyplot as plt
import pytest

from labkit.profiling.cost_model import Link
from labkit.profiling.sweeps import as_recording, backward_like, simulate_ring
from labkit.profiling.timeline import draw_together


def test_a_simulated_step_can_be_drawn_as_a_recorded_one():
    backward = backward_like([100, 300, 600], forward=0.2, backward=1.0)
    plan, link = [[0, 1], [2]], Link.of(1, latency_us=50)
    step = simulate_ring(backward, plan, link, 2)
    recording = as_recording(step, backward, plan, forward=0.2)
    [rank] = recording.ranks
    assert [one.bytes for one in rank.buckets()] == [400, 600]
    assert [one.after for one in rank.buckets()] == [2, 3]
    assert recording.overlaps()
    assert rank.exposed_seconds() == pytest.approx(step.exposed)
    late = as_recording(
        simulate_ring(backward, plan, link, 2, overlap=False), backward, plan, forward=0.2
    )
    assert not late.overlaps()
    plt.close(draw_together({"one": recording, "other": late}))


def test_the_last_gradient_of_a_bucket_is_ready_at_its_launch_in_spite_of_rounding():
    # The second gradient is ready while the link is busy. Here, 0.1 s + its delay rounds down.
    backward, plan = backward_like([1, 2], forward=0.1, backward=1.7), [[0], [1]]
    step = simulate_ring(backward, plan, Link.of(1, latency_us=2e6), 2)
    [rank] = as_recording(step, backward, plan, forward=0.1).ranks
    assert [one.after for one in rank.buckets()] == [1, 2]
