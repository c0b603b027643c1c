"""Recorded messages on one backward: equal messages take equal time, whatever was measured."""

import pytest
import torch

from labkit.profiling.cost_model import Backward, Link
from labkit.profiling.recorded_ways import ComputedStep, RecordedWay, on_one_backward
from labkit.profiling.recording import Collective, RankRecording, Recording

LINK = Link(latency=0.5, seconds_per_byte=1.0)  # a ring of two: 2 steps, and each byte once
COMPUTED = ComputedStep(1.0, Backward(ready=(2.0, 4.0, 6.0), bytes=(1, 2, 3)))


def recorded(noise: float, *messages: tuple[int, int]) -> RecordedWay:
    """Messages of (bytes, gradients ready at the launch), at times that are slower by `noise`."""
    sent = tuple(
        Collective("all_reduce", nbytes, after, number, noise * after, noise * after + 1)
        for number, (nbytes, after) in enumerate(messages)
    )
    rank = RankRecording(0, 0.0, 9.0 * noise, ((0.0, noise),), (), sent)
    return RecordedWay(Recording((rank,)), [torch.zeros(0)], 9e3 * noise)


def test_ways_that_send_the_same_take_the_same_time_however_noisy_their_recordings_were():
    ways = {"quiet": recorded(1, (1, 1), (5, 3)), "busy": recorded(7, (1, 1), (5, 3))}
    quiet, busy = on_one_backward(ways, COMPUTED, LINK).values()
    assert quiet == busy


def test_a_message_waits_for_its_gradients_and_for_the_link():
    ways = {"overlapped": recorded(1, (2, 1), (1, 2), (3, 3)), "after": recorded(1, (6, 3))}
    overlapped, after = (one.ranks[0] for one in on_one_backward(ways, COMPUTED, LINK).values())
    assert [(c.launched, c.done) for c in overlapped.collectives] == [(2, 5), (4, 7), (6, 11)]
    assert (overlapped.end, overlapped.exposed_seconds()) == (11, 5)
    assert (after.end, after.exposed_seconds()) == (13, 7)
    assert overlapped.forwards == ((0, 1.0),)


def test_a_step_does_not_end_before_its_backward():
    [step] = on_one_backward({"one": recorded(1, (1, 1))}, COMPUTED, LINK).values()
    assert step.ranks[0].end == pytest.approx(6)
