"""The certificate of functions: what ranks measure, the verdict on it, and what is no verdict."""

import functools
import multiprocessing
from typing import Any

import pytest
import torch
from doctor import steps_to_certify as step

from ddp_doctor.certificate.measure import compare
from ddp_doctor.functions.gradients import Measured
from ddp_doctor.functions.verdict import conclude
from ddp_doctor.testing import NotJudgedError, assert_certified

EQUAL, SCALED, DIFFERENT, NOT_JUDGED = "equal", "scaled", "different", "not judged"
SUM_OF_OWN = functools.partial(step.own_mean, reduce=step.sum_over_constant)
CASES: dict[str, tuple[Any, Any, Any, int, str, str]] = {
    # model, backward, batches, ranks, the verdict, and a part of the text
    "a mean": (step.ddp, step.own_mean, step.batches, 2, EQUAL, ""),
    "the count of all": (step.ddp, step.count_of_all, step.unequal, 3, EQUAL, ""),
    "own counts": (step.ddp, step.own_mean, step.unequal, 3, DIFFERENT, "no factor repairs it"),
    "1/W": (step.ddp, step.over_world_size, step.batches, 3, SCALED, "1/W = 0.3333 times"),
    "a constant": (step.ddp, SUM_OF_OWN, step.batches, 2, NOT_JUDGED, "pass constant='rank'"),
    "plain gather": (step.ddp, step.plain_gather, step.batches, 2, DIFFERENT, "P0 equal"),
    "no last sync": (step.ddp, step.never_synchronized, step.batches, 2, DIFFERENT, "diverge"),
    "micro-batches": (step.ddp, step.accumulated, step.unequal, 2, NOT_JUDGED, "the order of"),
    "summed by hand": (step.plain, step.summed, step.batches, 2, SCALED, "P0 scaled"),
    "dropout": (step.with_dropout, step.own_mean, step.batches, 2, NOT_JUDGED, "it is repeated"),
    "own statistics": (step.with_own_statistics, step.own_mean, step.batches, 2, DIFFERENT, ""),
    "MiniDDP": (step.miniddp, step.count_of_all, step.unequal, 2, EQUAL, ""),
    "fully_shard": (step.sharded, step.count_of_all, step.unequal, 3, EQUAL, ""),
    "replicate": (step.replicated, step.over_world_size, step.batches, 2, SCALED, "1/W = 0.5"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_certified_and_only_the_server_that_starts_the_next_is_left(case: str) -> None:
    model, backward, batches, ranks, wanted, said = CASES[case]
    verdict, text = EQUAL, ""
    try:
        assert_certified(make_model=model, backward=backward, batches=batches, ranks=ranks)
    except AssertionError as error:
        verdict, text = str(error).strip().partition(",")[0].lower(), str(error)
    assert verdict == wanted, text
    assert said in " ".join(text.split()), text
    assert not multiprocessing.active_children()


RIGHT, TWICE, OTHER = (1.0, 1.0), (2.0, 2.0), (1.0, 2.0)
MEASURED = dict.fromkeys(("P0", "P1", "P2", "replicas", "repeat", "order", "twice"), RIGHT)
A_SUM = {"twice": TWICE, "P1": (0.5, 0.5)}  # of 2 ranks; a constant divides it


@pytest.mark.parametrize(
    ("found", "constant", "verdict", "said"),
    [
        ({}, None, EQUAL, "the same gradient"),
        ({"repeat": OTHER, "replicas": OTHER}, None, NOT_JUDGED, "when it is repeated"),
        ({"replicas": TWICE, "order": OTHER}, None, DIFFERENT, "will diverge"),
        ({"order": OTHER, "P1": OTHER}, None, NOT_JUDGED, "the order of the samples"),
        ({"P0": OTHER, "P1": OTHER, "twice": TWICE}, None, DIFFERENT, "(P0)"),
        ({"P2": OTHER, "P1": TWICE}, None, DIFFERENT, "dealt differently"),
        ({"P1": TWICE}, None, SCALED, "W = 2 times"),
        ({"P1": (1.1, 1.1)}, None, SCALED, "is 1.1 times"),
        (A_SUM, None, NOT_JUDGED, "have 1 times the right"),
        (A_SUM, "rank", EQUAL, "have the right gradient"),
        (A_SUM, "all", SCALED, "have 0.5 times"),
    ],
)
def test_the_first_comparison_that_is_not_equal_decides(
    found: dict[str, Any], constant: Any, verdict: str, said: str
) -> None:
    reference = {"w": torch.tensor(RIGHT)}
    compared = {
        name: compare({"w": torch.tensor(value)}, reference, {})
        for name, value in (MEASURED | found).items()
    }
    of_ranks = ("P0", "P2", "replicas", "repeat")
    ranks = Measured(comparisons={name: compared.pop(name) for name in of_ranks})
    certificate = conclude((ranks, ranks, Measured(comparisons=compared)), 2, constant)
    assert certificate.verdict == verdict
    assert said in certificate.why


def test_the_user_says_what_divides_a_sum() -> None:
    given = {"make_model": step.ddp, "backward": SUM_OF_OWN, "batches": step.batches}
    assert_certified(**given, constant="rank")


@pytest.mark.parametrize(
    ("model", "backward", "batches", "said"),
    [
        (step.ddp, step.zero, step.batches, "zero everywhere"),
        (step.ddp, step.not_a_number, step.batches, "NaN or infinity"),
        (step.ddp, step.cropped, step.batches, "did not get the same samples"),
        (step.ddp, step.steps, step.batches, "backward changed 0.weight"),
        (step.unseeded, step.own_mean, step.batches, "starts with another 0.weight than rank 0"),
        (step.ddp, step.raises, step.batches, "ArithmeticError: no loss today"),
        (step.ddp, step.of_pairs, step.unequal, "in of_pairs"),
    ],
)
def test_what_shows_nothing_is_not_judged(
    model: Any, backward: Any, batches: Any, said: str
) -> None:
    with pytest.raises(NotJudgedError, match=said) as raised:
        assert_certified(make_model=model, backward=backward, batches=batches)
    assert "ddp_doctor/" not in str(raised.value)


def test_the_user_says_what_a_sample_is() -> None:
    given = {"make_model": step.ddp, "backward": step.of_pairs, "batches": step.pairs}
    assert_certified(**given, join=step.join_pairs, deal=step.deal_pairs)


def test_ranks_that_wait_for_one_another_are_ended_and_named() -> None:
    given = {"make_model": step.ddp, "backward": step.waits, "batches": step.batches}
    with pytest.raises(NotJudgedError, match="failed"):
        assert_certified(**given, limit=1.0)
