"""The tour of the museum marks wrong gradients, and counts what a test catches."""

from labkit.scenarios import museum_tour
from labkit.testing import museum

NAMES = {exhibit.name for exhibit in museum.exhibits()}


def only_rank_1_fails(wrap, rank, world_size):
    assert rank != 1 or "sum_instead_of_average" not in wrap.__module__


def never_fails(wrap, rank, world_size):
    assert world_size == 2


def test_gradients_are_called_wrong_only_for_exhibits_that_this_training_triggers():
    curves = museum_tour.loss_curves(steps=2)
    assert set(curves) == NAMES | {"one process"}
    wrong = {name for name, curve in curves.items() if curve.gradient_was_wrong}
    assert {"bypassed_wrapper", "divided_twice", "own_loss_scale"} <= wrong
    assert wrong.isdisjoint({"one process", "clip_before_sync", "zeros_for_none", "waiting_hook"})
    assert all(len(curve.losses) == 2 for curve in curves.values())


def test_an_exhibit_is_caught_if_a_test_fails_on_any_rank():
    caught = museum_tour.caught_by([only_rank_1_fails, never_fails])
    assert caught == {"only_rank_1_fails": {"sum_instead_of_average"}, "never_fails": set()}
