"""What follows from the steps that the ranks and one process wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
from doctor.noted import pairs_of, rows_of

from ddp_doctor.certificate.evidence import lacks_samples
from ddp_doctor.certificate.files import Place, samples_of
from ddp_doctor.certificate.measure import HALF, compare, factor_name, shares
from ddp_doctor.certificate.plan import (
    AGAIN,
    COMBINES,
    COPIES,
    DEAL,
    LATER,
    OWN,
    TWICE,
    USUAL,
    WORLD,
    WORLD_IN_SCRIPT,
    Part,
)
from ddp_doctor.certificate.record import Step, sums_of
from ddp_doctor.certificate.samples import Record
from ddp_doctor.certificate.verdict import judge
from ddp_doctor.facts.certificate import Certificate

SEEN = [
    {"kind": "weights", "key": "0.0", "place": "train.py:9", "weights": 1.0},
    rows_of(torch.ones(2, 3)),
]


def parts(folder: Path) -> tuple[Part, Part]:
    return Part(str(folder), "ranks"), Part(str(folder), "one")


def step_of(part: Part, rank: int, turn: int, kind: str, facts: dict[str, Any]) -> None:
    """Write a step like any other, but for these facts."""
    gradients = facts.pop("gradients", {"0.0": torch.ones(4)})
    given: dict[str, Any] = {"optimizer": 0, "world": 2, "names": {"0.0": "weight"}}
    given |= {
        "backwards": 1,
        "weights": {"0.0": torch.ones(4)},
        "rates": [0.1],
        "clears_gradients": True,
    }
    given |= {"premises": SEEN, "sums": {key: sums_of(g) for key, g in gradients.items()}}
    step = Step(**{**given, "rank": rank, "turn": turn, "kind": kind.replace("_", " ")} | facts)
    step.write(part, gradients if rank == 0 else None)


def written(folder: Path, failed: str = "", **of_the_ranks: list[dict[str, Any]]) -> Certificate:
    """The verdict on steps: for each kind, what the ranks wrote. One process is like rank 0."""
    ranks, one = parts(folder)
    for turn, (kind, facts) in enumerate(of_the_ranks.items()):
        for rank, of_rank in enumerate(facts):
            of_one = of_rank.get("one", {})
            own = {name: value for name, value in of_rank.items() if name != "one"}
            step_of(ranks, rank, turn, kind, dict(own))
            if rank == 0:
                step_of(one, rank, turn, kind, own | of_one)
    ranks.path(WORLD).write_text("2")
    return judge(ranks, one, failed, "")


def gradient(*values: float) -> dict[str, Any]:
    return {"gradients": {"0.0": torch.tensor(values).float()}}


def logged(*values: float) -> dict[str, Any]:
    fact = {"kind": "numbers", "key": "", "place": "train.py:3"}
    numbers = (torch.tensor([value]).double() for value in values)
    return {"premises": [*SEEN, *(fact | {"values": number} for number in numbers)]}


ONES, RAMP, TURNED = gradient(1, 1, 1, 1), gradient(0, 1, 2, 3), gradient(1, 2, 1, 1)
ELSEWHERE = RAMP | {"premises": [SEEN[0], rows_of(torch.zeros(2, 3))]}  # a deal of other samples
SECOND = {"gradients": {"1.0": torch.ones(4)}}
SAME, NEXT, LIKE_ONE, CLIPS = [{}, {}], f"{LATER}_9", {"one": ONES}, {"clips": True}
UNJOINED = "train.py:30 cannot be joined"
NAMES = {"names": {"0.0": "weight", "0.1": "unused"}}
HALF_USED = {"gradients": {"0.0": torch.ones(4), "0.1": torch.zeros(4)}} | NAMES


def with_rows(*rows: float) -> dict[str, Any]:
    return {"premises": [SEEN[0], rows_of(torch.tensor(rows).float()[:, None])]}


def in_a_sequence(*values: float) -> dict[str, list[dict[str, Any]]]:
    """Each rank has a part of a sequence: one process computes the positions of its own."""
    own = gradient(*values)
    return {OWN: [own | {"one": ONES | {"numbers": ["train.py:30"]}}, own]}


def unequal(**again: Any) -> dict[str, list[dict[str, Any]]]:
    own = gradient(2, 2.1, 2.2, 2.3)
    return {OWN: [own | {"one": ONES}, own], AGAIN: [RAMP | again | LIKE_ONE, RAMP | again]}


def untrained(second: float) -> dict[str, list[dict[str, Any]]]:
    ours, theirs, own = (
        {"untrained_weights": {"book": torch.ones(4) * n}} for n in (1.0, 2.0, second)
    )
    return {OWN: [ours, own], COPIES: [ours, theirs]}


def of_a_constant(constant: float, columns: int = 1) -> dict[str, list[dict[str, Any]]]:
    """A sum over two samples of each rank, divided by a constant."""
    loss = pairs_of(torch.ones(2), torch.ones(2)) | {"targets": 2 * columns}
    own = {"premises": [*SEEN, loss], "scales": {("train.py:4", 0): constant}}
    one = gradient(2, 2, 2, 2) | {"premises": [*SEEN, loss, loss]}
    twice, copies = gradient(4, 4, 4, 4), own | gradient(2, 2, 2, 2)
    return {OWN: [own | {"one": one}, own], TWICE: [twice] * 2, COPIES: [copies | {"one": one}] * 2}


def one_count() -> dict[str, list[dict[str, Any]]]:
    def seen(count: float, *rows: float) -> dict[str, Any]:
        return {"premises": [*with_rows(*rows)["premises"], logged(count)["premises"][-1]]}

    twice = gradient(2, 2, 2, 2)
    return {
        OWN: [twice | seen(16, 1, 2) | {"one": ONES | seen(8, 1, 2, 3, 4)}, twice | seen(16, 3, 4)]
    }


def local_sgd() -> dict[str, list[dict[str, Any]]]:
    """The weights are averaged before steps 4 and 6."""
    steps = {OWN: [{}, RAMP]}
    for at in range(1, 7):
        own = {"weights": {"0.0": torch.ones(4) * 2}} if at in (3, 5) else {}
        steps[f"{LATER}_{at}"] = [{}, own]
    return steps


def of_micro_batches(passes: int) -> dict[str, list[dict[str, Any]]]:
    own = {"backwards": passes}
    return {OWN: [own, own], DEAL: [own | ELSEWHERE | LIKE_ONE, own | ELSEWHERE]}


# What the ranks wrote, the verdict on it, and a part of the reason or of a note.
JUDGED = {
    "weights that differ at a later step, though no gradient does": (
        {OWN: SAME, NEXT: [{}, {"weights": {"0.0": torch.ones(4) * 1.00001}}]},
        "different",
        "At optimizer step 1 (counted from 0), the ranks' weights differ: rank 1's",
    ),
    "one process and one micro-batch": (
        {OWN: [{"world": 1}]},
        "not judged",
        "Start two, for example with --ranks 2.",
    ),
    "learning rates that differ": (
        {OWN: SAME, NEXT: [{}, {"rates": [0.1001]}]},
        "different",
        "At optimizer step 1 (counted from 0), the ranks' learning rates differ: 0.1001 and 0.1",
    ),
    "a step that is not the same once more": (
        unequal(is_elsewhere=True),
        "not judged",
        "the same samples give",
    ),
    "a further step of other samples": (
        unequal(premises=ELSEWHERE["premises"]),
        "different",
        "",
    ),
    "a gradient that other samples do not change": (
        {OWN: [with_rows(1, 2), with_rows(3, 4)], COPIES: [with_rows(1, 2)] * 2},
        "not judged",
        "Other samples give the same gradient",
    ),
    "a count of one rank's that one process has": (
        one_count(),
        "not judged",
        "the ranks reduced to 16, and one process to 8",
    ),
    "gradients of an optimizer that was made second": (
        {OWN: [SECOND | {"one": {"gradients": {"1.0": torch.arange(4.0)}}}, SECOND]},
        "different",
        "another gradient",
    ),
    "a deal that matters to the ranks": (
        {OWN: SAME, DEAL: [TURNED | LIKE_ONE, TURNED]},
        "different",
        "",
    ),
    "a deal that matters to one process, too": (
        {OWN: SAME, DEAL: [TURNED, TURNED]},
        "not judged",
        "no reference",
    ),
    "a deal that matters, though a loss is logged": (
        {OWN: [logged(0.5, 3, 5)] * 2, DEAL: [logged(0.7, 4, 4) | TURNED | LIKE_ONE] * 2},
        "different",
        "",
    ),
    "a deal of ranks that hold different parameters": (
        {
            OWN: [{"weights": {"0.0": torch.ones(4) * half}} for half in (1, 2)],
            DEAL: [{"weights": {"0.0": torch.ones(4) * half}} | RAMP for half in (1, 2)],
        },
        "not judged",
        "",
    ),
    "a deal of samples that one process could not join": (
        {
            OWN: [{"one": gradient(3, 4, 5, 6) | {"join_failures": ["train.py:30"]}}, {}],
            DEAL: [gradient(2, 3, 4, 5) | {"one": gradient(3, 4, 5, 6)}, gradient(2, 3, 4, 5)],
        },
        "not judged",
        UNJOINED,
    ),
    "a deal to ranks that split one batch": (
        {
            OWN: [with_rows(1, 2)] * 2,
            # One has the first row twice, and the other one the second.
            DEAL: [
                with_rows(1, 1) | gradient(1, 2, 3, 4) | LIKE_ONE,
                with_rows(2, 2) | gradient(1, 2, 3, 4),
            ],
        },
        "equal",
        "",
    ),
    "a deal of other samples": (of_micro_batches(1), "equal", ""),
    "a deal of other samples to micro-batches": (of_micro_batches(2), "not judged", ""),
    "positions of each rank's own, and a factor": (in_a_sequence(2, 2, 2, 2), "scaled", ""),
    "positions of each rank's own": (in_a_sequence(2, 2.1, 2.2, 2.3), "not judged", UNJOINED),
    "untrained parameters that only a step makes differ": (
        untrained(1.0),
        "different",
        "rank 1's book is not rank 0's",
    ),
    "untrained parameters that always differ": (untrained(2.0), "equal", ""),
    "what is not sharded in a sharded model": (
        {OWN: [{"has_shards": True} | ONES, {"has_shards": True} | gradient(2, 2, 2, 2)]},
        "different",
        "rank 1's is not rank 0's",
    ),
    "parameters that grew after the first step": (
        {OWN: SAME, DEAL: [gradient(1, 1, 1, 1, 1)] * 2, COPIES: [gradient(1, 1, 1, 1, 1)] * 2},
        "equal",
        "",
    ),
    "parameters without a gradient": ({OWN: [HALF_USED] * 2}, "equal", "1 of 2 parameters had no"),
    "weights that are averaged every second step": (local_sgd(), "different", "every 2 steps"),
    "an optimizer of other parameters that steps later": (
        {OWN: SAME, COPIES: SAME, NEXT: [SECOND | {"optimizer": 1}] * 2},
        "equal",
        "on, other parameters",
    ),
    "an optimizer that takes no second step": (
        {OWN: SAME, NEXT: [SECOND | {"optimizer": 1}] * 2},
        "not judged",
        "takes no second one",
    ),
    "clipping that does not act": (
        {OWN: [CLIPS] * 2, USUAL: [CLIPS] * 2},
        "equal",
        "One process with all samples",
    ),
    "three ranks whose copies are right": (
        {OWN: [{"world": 3} | RAMP | LIKE_ONE, *[{"world": 3} | RAMP] * 2], COPIES: SAME},
        "different",
        "Copies of one batch are right",
    ),
    "gradients that are never cleared": (
        {OWN: [{"clears_gradients": False}] * 2},
        "equal",
        "never called zero_grad()",
    ),
    "other rows, though the gradients agree": (
        {OWN: [{"one": {"premises": [SEEN[0], rows_of(torch.zeros(2, 3))]}}, {}]},
        "not judged",
        "does not get the samples",
    ),
    "samples that could not be joined, though the gradients agree": (
        {OWN: [{"one": {"join_failures": ["train.py:30"]}}, {}]},
        "equal",
        "if it had the same samples, which is not shown: What the ranks use at train.py:30",
    ),
    "a gradient that doubles with the samples": (
        {OWN: [{"scales": {("train.py:4", 0): 8.0}}] * 2, TWICE: [gradient(2, 2, 2, 2)] * 2},
        "not judged",
        "divided by 8 at train.py:4: a constant",
    ),
    "a sum with a term that a negative number scales": (
        {OWN: [{"scales": {("train.py:4", 0): -2.0}}] * 2, TWICE: [gradient(2, 2, 2, 2)] * 2},
        "not judged",
        "nothing divides it",
    ),
    "a sum divided by the rows of each rank": (of_a_constant(2), "equal", "that mean is meant"),
    "a sum divided by the rows of all ranks": (of_a_constant(4), "not judged", "whose meaning"),
    "a sum divided by the targets of each rank, as many as all ranks' rows": (
        of_a_constant(4, columns=2),
        "not judged",
        "whose meaning decides",
    ),
    "a mean that was not shown to be one": (
        {OWN: SAME},
        "equal",
        "computes the same gradient, if the loss is a mean",
    ),
    "a gradient that stays with twice the samples": (
        {OWN: [{"scales": {("train.py:4", 0): 8.0}}] * 2, TWICE: SAME},
        "equal",
        "",
    ),
    "a gradient that is not a number": (
        {OWN: [gradient(float("nan"), 1, 1, 1)] * 2},
        "not judged",
        "rank 0's gradient of weight holds NaN or infinity",
    ),
    "a later gradient that is not a number on any rank": (
        {OWN: SAME, NEXT: [gradient(float("nan"), 1, 1, 1)] * 2},
        "not judged",
        "At optimizer step 1 (counted from 0), rank 0's gradient of weight holds NaN",
    ),
    "gradients that no rank combines": (
        {OWN: [with_rows(1, 2), RAMP | with_rows(3, 4)], COPIES: [with_rows(1, 2)] * 2},
        "different",
        "rank 1's is not rank 0's",
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_steps_are_judged_by_what_the_ranks_and_one_process_wrote(
    name: str, tmp_path: Path
) -> None:
    facts, verdict, why = JUDGED[name]
    found = written(tmp_path, **facts)
    assert found.verdict == verdict
    assert why in "\n".join([found.why, *found.notes])
    of = {one.name: one for one in found.properties}
    if verdict == "not judged" and DEAL in facts:
        assert (of["P2"].verdict, of["P2"].ratio) == ("not judged", None)
    if NEXT in facts and verdict != "equal":
        assert found.ratio is None


@pytest.mark.parametrize(
    ("rows", "own", "noted"),
    [
        ([1.0, 1.0], [1.0, 1.0], True),
        ([1.0, 2.0], [1.0, 1.0], False),
        ([1.0, 1.0], [1.0, 2.0], False),  # each takes a part of them
        ([], [1.0, 1.0], False),
    ],
)
def test_ranks_with_the_same_samples_are_noted(
    rows: list[float], own: list[float], noted: bool, tmp_path: Path
) -> None:
    """`rows`: what each rank made; `own`: what its model got."""
    (tmp_path / "ranks").mkdir()
    place = Place("train.py", 3, function="randn")
    for rank in range(2):
        made = {(place, 0): torch.full((2,), rows[rank])} if rows else {}
        Record(samples=made).save(parts(tmp_path)[0].path(samples_of(rank)))
    found = written(tmp_path, **{OWN: [with_rows(row, row) for row in own]})
    assert any("All ranks have the same samples" in note for note in found.notes) == noted


def test_a_script_without_a_step_is_judged_by_its_error(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    found = written(tmp_path, failed="ValueError: no at train.py:3")
    assert (found.verdict, found.error) == ("not judged", "ValueError: no at train.py:3")
    assert "did not finish an optimizer step: ValueError: no at train.py:3." in found.why


def test_a_script_that_ends_with_an_error_is_not_said_to_combine_nothing(tmp_path: Path) -> None:
    found = written(tmp_path, failed="RuntimeError: no at train.py:3", **{OWN: [{}, RAMP]})
    assert found.verdict == "not judged"
    assert "RuntimeError: no at train.py:3" in found.why


@pytest.mark.parametrize(
    ("weights", "optimizer", "verdict"),
    [(1.0, 0, "not judged"), (1.5, 0, "different"), (1.0, 1, "different")],
)
def test_ranks_whose_weights_stay_equal_combine_their_gradients_after_the_optimizer_got_them(
    weights: float, optimizer: int, verdict: str, tmp_path: Path
) -> None:
    """What another optimizer's weights do, as those of a GAN's other half, shows nothing."""
    own = [{}, RAMP]
    seen = [{"optimizer": optimizer}, {"optimizer": optimizer} | own[1]]
    seen[1]["weights"] = {"0.0": torch.ones(4) * weights}
    found = written(tmp_path, **{OWN: own, f"{LATER}_7": seen, f"{LATER}_8": seen})
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("facts", "mixed_up"),
    [
        (RAMP | {"premises": [SEEN[0], rows_of(torch.zeros(2, 3))]}, True),
        (RAMP | {"premises": [SEEN[0] | {"weights": 2.0}, SEEN[1]]}, False),
        (gradient(*range(8)), True),  # what the ranks drew as a weight
        (RAMP | {"join_failures": ["train.py:30"]}, True),
        (RAMP | {"numbers": ["train.py:30"]}, False),
    ],
    ids=["other rows", "other weights", "a weight of all ranks' rows", "shapes", "other numbers"],
)
def test_one_process_is_started_again_if_it_had_other_rows_than_the_ranks_with_their_weights(
    facts: dict[str, Any], mixed_up: bool, tmp_path: Path
) -> None:
    own = {"one": facts}
    assert written(tmp_path, **{OWN: [own, {}]}).verdict == "not judged"
    assert lacks_samples(parts(tmp_path)[1], "") == mixed_up


def test_an_optimizer_whose_step_calls_collectives_is_not_said_to_apply_different_gradients(
    tmp_path: Path,
) -> None:
    (tmp_path / "ranks").mkdir()
    parts(tmp_path)[0].path(COMBINES).touch()
    found = written(tmp_path, **{OWN: [{}, RAMP]})
    assert found.verdict == "not judged"
    assert "combined in its step" in found.why


def test_copies_and_a_deal_that_agree_are_no_verdict_as_of_a_sum(tmp_path: Path) -> None:
    own = gradient(2, 2.1, 2.2, 2.3)
    found = written(tmp_path, **in_a_sequence(2, 2.1, 2.2, 2.3), **{DEAL: [own] * 2, COPIES: SAME})
    assert [one.verdict for one in found.properties[:3]] == ["not judged", "equal", "equal"]
    assert found.verdict == "not judged"


def test_one_process_that_divides_by_the_number_of_ranks_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    parts(tmp_path)[1].path(WORLD_IN_SCRIPT).touch()
    assert written(tmp_path, **{OWN: SAME}).verdict == "equal"
    assert (
        written(tmp_path, **{OWN: [{"scales": {("train.py:4", 0): 0.5}}] * 2}).verdict
        == "not judged"
    )


def test_ranks_of_which_only_one_steps_are_not_compared(tmp_path: Path) -> None:
    failed = "TimeoutError: another rank took no first step within 60 s"
    found = written(tmp_path, failed, **{OWN: [ONES | {"one": RAMP}]})
    assert (found.verdict, found.why[:14]) == ("not judged", "Not every rank")


def test_ranks_that_weigh_samples_as_one_process_does_do_not_divide_by_their_own_counts() -> None:
    union, first, other = torch.tensor([3.0, 2.0]), torch.tensor([5.0, 1.0]), {"b": torch.ones(1)}
    given = [{"w": union}, {"w": 0.9 * union + 0.1 * first}, {"w": first}]
    assert shares(*given) is not None
    assert shares(given[0], given[0], given[2]) is None
    assert shares(given[0] | other, given[1] | other, given[2]) is None
    assert shares({"w": 0.9 * union}, *given[1:]) is None, "the weights do not add up to 1"


@pytest.mark.parametrize(
    ("turned", "factor", "kind"),
    [
        (0.0, 1.0, "equal"),
        (0.02, 1.0, "different"),
        (0.0, 1.004, "scaled"),
        (0.0005, 2.0, "scaled"),
    ],
)
def test_an_error_of_two_percent_is_neither_equal_nor_a_factor(
    turned: float, factor: float, kind: str
) -> None:
    wanted = torch.tensor([1.0, 0.0, 0.0])
    got = factor * torch.tensor([1.0, turned, 0.0])
    assert compare({"w": got}, {"w": wanted}, {}).kind == kind
    assert compare({"w": wanted * 1.004}, {"w": wanted}, {}, HALF).kind == "equal"


def test_a_factor_that_is_only_near_one_of_the_ranks_has_no_name() -> None:
    assert factor_name(0.7105, 2) is None  # what clipping left, and not 1/√W
    assert factor_name(0.5, 2) == factor_name(0.502, 2, HALF) == "1/W"


def test_a_parameter_whose_gradient_is_rounding_in_one_of_two_has_no_ratio() -> None:
    sides = [{"w": torch.ones(4), "b": torch.tensor([bias])} for bias in (1.0, 1e-8)]
    for got, wanted in (sides, sides[::-1]):
        assert str(compare(got, wanted, {}).worst).startswith("b, whose gradient is zero or round")


@pytest.mark.parametrize(
    ("gradients", "said"), [({"0.0": torch.zeros(2)}, "is zero"), ({}, "get no gradient")]
)
def test_a_zero_gradient_and_no_gradient_are_told_apart(
    gradients: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    found = written(tmp_path, **{OWN: [{"gradients": gradients}] * 2})
    assert (found.verdict, found.world) == ("not judged", 2)
    assert said in found.why
