"""What two runs are shown to have in common, and how samples are dealt."""

from dataclasses import dataclass

import torch
from doctor.noted import pairs_of, rows_of

from ddp_doctor.certificate.files import Place
from ddp_doctor.certificate.plan import COPIES, DEAL, OWN, TWICE, Part
from ddp_doctor.certificate.premises import Premises, doubt_between, same_rows
from ddp_doctor.certificate.samples import Dealer, Record
from ddp_doctor.certificate.state import fill


def why_parted(ours: list, theirs: list) -> str:
    doubt = doubt_between(ours, theirs)
    return "" if doubt is None else doubt.why


def test_the_doctors_own_tensors_are_on_the_cpu_whatever_device_the_script_has_chosen() -> None:
    with torch.device("meta"):
        weight = torch.nn.Parameter(torch.zeros(4, device="cpu"))
        assert fill(weight, "0.0")
        rows = torch.eye(3, device="cpu")
        assert same_rows([rows], [rows.flip(0)])
    assert weight.std() > 0


@dataclass
class Nested:
    """A batch as DETR's: a model is given an object that holds the tensor."""

    rows: torch.Tensor


def test_the_rows_of_a_batch_in_a_class_of_ones_own_are_compared() -> None:
    seen = []
    for rows in (torch.ones(2, 3), torch.zeros(2, 3)):
        premises = Premises()
        premises.note_model("0.0", ((Nested(rows),), {}), weights=1.0)
        seen.append(premises.notes)
    assert why_parted(seen[0], seen[0]) == ""
    assert "does not get the samples" in why_parted(*seen)


def test_the_same_rows_in_another_order_or_with_more_padding_are_the_same_samples() -> None:
    rows = torch.arange(1, 13).view(4, 3)
    assert same_rows([rows[:2], rows[2:]], [rows.flip(0)])
    longer = torch.nn.functional.pad(rows, (0, 2))
    assert same_rows([rows[:2], longer[2:]], [longer])
    assert same_rows([rows[:2].T, rows[2:].T], [rows.T])
    assert same_rows([torch.ones(2, 3)] * 2, [torch.ones(2, 3)])
    assert not same_rows([rows[:2], rows[2:]], [rows[[0, 0, 2, 3]]])
    assert not same_rows([rows[:2], rows[2:]], [rows[:2]])
    assert not same_rows([rows[:2]], [rows])
    assert not same_rows([rows[:2, :2], rows[2:, :2]], [rows]), "what is longer is no padding"
    assert same_rows([rows[:2]], [torch.nn.functional.pad(rows[:2], (0, 0, 0, 2))])


def test_other_rows_and_labels_that_came_apart_are_named_with_their_line() -> None:
    rows = torch.randn(4, 3)
    ranks = [rows_of(rows[:2]), rows_of(rows[2:])]
    assert why_parted(ranks, [rows_of(rows)]) == ""
    assert why_parted(ranks, [rows_of(rows[:2])]).startswith("At train.py:9, the model")
    out, labels = torch.randn(4), torch.tensor([0.0, 1, 1, 0])
    losses = [pairs_of(out[:2], labels[:2]), pairs_of(out[2:], labels[2:])]
    together = [rows_of(rows), pairs_of(out, labels)]
    assert why_parted([*ranks, *losses], together) == ""
    apart = [rows_of(rows), pairs_of(out, labels.roll(1))]
    assert why_parted([*ranks, *losses], apart).startswith("At train.py:10, the targets")


def test_the_rows_of_a_models_two_inputs_stay_together() -> None:
    latents, prompts = torch.randn(4, 3), torch.randint(9, (4, 2))
    other = [rows_of(latents), rows_of(prompts.flip(0), "0.0/1")]
    both = [rows_of(latents), rows_of(prompts, "0.0/1")]
    halves = [
        one
        for half in (slice(0, 2), slice(2, 4))
        for one in (rows_of(latents[half]), rows_of(prompts[half], "0.0/1"))
    ]
    assert why_parted(halves, both) == ""
    assert "other rows of another" in why_parted(halves, other)
    longer = [
        rows_of(latents.flip(0)),
        rows_of(torch.nn.functional.pad(prompts.flip(0), (0, 2)), "0.0/1"),
    ]
    assert why_parted(halves, longer) == ""
    values, lengths = torch.arange(9.0), torch.tensor([1, 2, 3, 1, 2])
    ragged = [
        one
        for of_values, of_lengths in ((slice(0, 6), slice(0, 3)), (slice(6, 9), slice(3, 5)))
        for one in (rows_of(lengths[of_lengths]), rows_of(values[of_values], "0.0/1"))
    ]
    joined = [rows_of(lengths), rows_of(values, "0.0/1")]
    assert why_parted(ragged, joined) == ""
    assert "other rows of another" in why_parted(
        ragged, [joined[0], rows_of(values.flip(0), "0.0/1")]
    )
    offsets = [rows_of(torch.tensor([0, 2, 5]), "0.0/2"), rows_of(torch.tensor([0, 1]), "0.0/2")]
    of_one = rows_of(torch.tensor([0, 2, 5, 6, 7]), "0.0/2")
    assert why_parted([*ragged, *offsets], [*joined, of_one]) == "", "they begin anew on each rank"
    assert "does not get the samples" in why_parted(offsets, [of_one])
    positions = [rows_of(one, f"0.0/{n}") for n, one in enumerate((latents, torch.arange(4)))]
    moved = [rows_of(one, f"0.0/{n}") for n, one in enumerate((latents.flip(0), torch.arange(4)))]
    assert why_parted(positions, moved) == ""


def test_a_deal_of_a_round_keeps_the_samples_of_each_turn_together() -> None:
    place = Place("train.py", 3, function="randn")
    turns = {(place, turn): torch.arange(4.0) + 100 * turn for turn in range(2)}
    of = [Record(samples={key: one + 10 * rank for key, one in turns.items()}) for rank in (0, 1)]
    dealt = Dealer(Part("", "ranks", turns=3), 0, of).rows(DEAL, (place, 1), 4)
    assert dealt is not None
    assert bool((dealt >= 100).all())


def test_a_reduced_number_is_kept_as_it_was_and_a_loss_of_no_rows_is_none() -> None:
    premises, count = Premises(), torch.tensor([4.0], dtype=torch.float64)
    premises.note_reduction(count)
    count /= 2
    premises.note_loss("mse_loss", (torch.zeros(0, 4, requires_grad=True), torch.zeros(0, 4)), {})
    assert premises.notes[0]["values"].tolist() == [4.0]


def test_a_pass_of_one_process_gets_the_samples_of_one_pass_of_a_rank_as_they_are() -> None:
    place = Place("train.py", 3, function="randn")
    of = [
        Record(samples={(place, turn): torch.full((2,), 10.0 * rank + turn) for turn in range(2)})
        for rank in range(2)
    ]
    handed = Dealer(Part("", "one", all_passes=True), 0, of)
    got = [float(handed.rows(OWN, (place, turn), 2)[0]) for turn in range(4)]
    assert got == [0, 1, 10, 11]
    assert [float(handed.rows(COPIES, (place, turn), 2)[0]) for turn in range(4)] == [0, 1, 0, 1]
    twice = handed.rows(TWICE, (place, 2), 2)
    assert twice is not None
    assert twice.tolist() == [10.0] * 4
    assert handed.items(TWICE, (place, 4)) is None, "no rank made a fifth pass"


def test_copies_are_rank_0s_rows_also_where_one_process_has_as_many_as_all_ranks() -> None:
    key = (Place("train.py", 3, function="__getitem__"), 0)
    of = [Record(samples={key: torch.arange(2.0) + 10 * rank}) for rank in range(2)]
    copies = Dealer(Part("", "one"), 0, of).rows(COPIES, key, length=4)
    assert copies is not None
    assert copies.tolist() == [0, 1]
