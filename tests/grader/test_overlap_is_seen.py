"""Whether a reducer overlaps is decided by what the trusted side saw, not by what it says."""

import grader_overlap as reducers
import pytest
from grader_overlap import CHECK

from grader.check import run_check


def verdict(server, source):
    return run_check(CHECK, (), {"reducer": source}, server.address, seed=7)


@pytest.mark.parametrize("name", ["OVERLAPPED", "FUTURES"])
def test_a_reducer_that_overlaps_passes(server, name):
    found = verdict(server, getattr(reducers, name))
    assert found.passed, found.sentence


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AFTER_BACKWARD", "after backward"),
        ("FORGED_RECORDER", "after backward"),
        ("BACKWARD_TWICE", "more than once"),
        ("DECOY", "sent more than its gradients"),
        ("WAITS_IN_HOOK", "waited in the middle of backward"),
        ("WAITS_FOR_FUTURE_IN_HOOK", "waited in the middle of backward"),
        ("OPENS_GATES_ITSELF", "more than once"),
        ("OTHER_ORDER_ON_ONE_RANK", "all_reduce of 8 float32 on rank 0 and all_reduce of 64"),
    ],
)
def test_a_reducer_that_does_not_is_found_out(server, name, said):
    found = verdict(server, getattr(reducers, name))
    assert not found.passed
    assert said in found.sentence


def test_the_key_fails_when_its_gates_give_other_numbers_than_the_answer_knows(server):
    from dataclasses import replace

    broken = replace(CHECK, source=CHECK.source.replace('opened(given["gates"])', "lambda x, _: x"))
    found = run_check(broken, (), {"reducer": reducers.OVERLAPPED}, server.address, seed=7)
    assert not found.passed, "the numbers behind the gates do not matter"
