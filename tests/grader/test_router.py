"""The router adds up rightly, and sees a deadlock or a mismatch when it happens."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.inside.wire import WireError
from grader.router import Router


def collective(number, *tensors, op="all_reduce", reduce="SUM", **more):
    arrays = [np.asarray(t, "float32") for t in tensors]
    message = {"kind": "collective", "op": op, "tensors": arrays, "number": number, "group": ""}
    if op in ("broadcast", "recv", "scatter", "all_to_all"):
        message["expects"] = [array.size for array in arrays]
    reduces = op in ("all_reduce", "reduce", "reduce_scatter")
    return message | ({"reduce": reduce} if reduces else {}) | more


def wait(number):
    return {"kind": "waits", "for": number}


def answers(router):
    found = {}
    while router.replies:
        rank, reply = router.replies.popleft()
        found.setdefault(rank, []).append(reply)
    return found


@given(st.integers(2, 5), st.sampled_from(["SUM", "AVG", "MIN", "MAX", "PRODUCT"]), st.data())
def test_a_reduction_gives_every_rank_the_same_right_numbers(world_size, reduce, data):
    values = data.draw(
        st.lists(
            st.lists(st.integers(-9, 9), min_size=3, max_size=3),
            min_size=world_size,
            max_size=world_size,
        )
    )
    router = Router(world_size)
    for rank in data.draw(st.permutations(range(world_size))):
        router.take(rank, collective(0, values[rank], reduce=reduce))
    fold = {"SUM": np.sum, "AVG": np.mean, "MIN": np.min, "MAX": np.max, "PRODUCT": np.prod}
    wanted = fold[reduce](np.array(values, "float32"), axis=0)
    found = answers(router)
    for rank in range(world_size):
        np.testing.assert_allclose(found[rank][0]["tensors"][0], wanted, rtol=1e-6)


def test_the_other_collectives_give_each_rank_its_part():
    router = Router(2)
    for rank in range(2):
        own = [rank, rank + 10]
        router.take(rank, collective(0, own, op="broadcast", reduce="", root=1))
        router.take(rank, collective(1, own, op="all_gather", reduce=""))
        router.take(rank, collective(2, own, own, op="reduce_scatter"))
        router.take(rank, collective(3, own, op="gather", reduce="", root=0))
        router.take(
            rank, collective(4, *[[5], [6]][: 2 * (rank == 0)], op="scatter", root=0, expects=[1])
        )
    found = answers(router)
    parts = [[reply["tensors"] for reply in found[rank]] for rank in range(2)]
    for rank in range(2):
        assert [t.tolist() for t in parts[rank][0]] == [[1, 11]]
        assert [t.tolist() for t in parts[rank][1]] == [[0, 10], [1, 11]]
        assert [t.tolist() for t in parts[rank][2]] == [[1, 21]]
        assert [t.tolist() for t in parts[rank][4]] == [[5 + rank]]
    assert [t.tolist() for t in parts[0][3]] == [[0, 10], [1, 11]]
    assert parts[1][3] == []


def test_a_message_reaches_the_rank_and_tag_that_it_is_for():
    router = Router(3)
    router.take(2, collective(0, op="recv", reduce="", peer=0, tag=1))
    router.take(0, collective(0, [1], op="send", reduce="", peer=2, tag=0))
    assert answers(router) == {}
    router.take(0, collective(1, [2], op="send", reduce="", peer=2, tag=1))
    found = answers(router)
    assert found[2][0]["tensors"][0].tolist() == [2]
    assert found[0][0]["number"] == 1


def test_a_deadlock_is_named_the_moment_it_happens():
    router = Router(2)
    router.take(0, collective(0, [1, 2]))
    router.take(0, wait(0))
    assert not router.seen.trouble
    router.end(1, "returned")
    assert router.seen.trouble == "rank 0 waits in all_reduce of 2 float32; rank 1 has returned"
    assert "rank 1 has returned" in answers(router)[0][0]["failed"]


def test_ranks_that_wait_for_messages_from_each_other_are_a_deadlock():
    router = Router(2)
    for rank in range(2):
        router.take(rank, collective(0, op="recv", reduce="", peer=1 - rank, tag=0))
        router.take(rank, wait(0))
    assert "rank 0 waits in recv" in router.seen.trouble
    assert "rank 1 waits in recv" in router.seen.trouble


@pytest.mark.parametrize(
    "other",
    [
        collective(0, [1, 2, 3]),
        collective(0, [1, 2], reduce="MAX"),
        collective(0, [1, 2], op="broadcast", reduce="", root=0),
        collective(0, [[1], [2]]),
    ],
)
def test_collectives_that_differ_fail_on_every_rank(other):
    router = Router(2)
    router.take(0, collective(0, [1, 2]))
    router.take(1, other)
    assert "rank 0" in router.seen.trouble
    assert all("failed" in reply for replies in answers(router).values() for reply in replies)


def test_answers_are_held_until_backward_has_passed_its_last_gate_everywhere():
    router = Router(2, [{"a": 2.0}, {"a": 3.0}], hold=True)
    for rank in range(2):
        router.take(rank, collective(0, [1]))
    assert answers(router) == {}
    router.take(0, {"kind": "gate", "name": "a", "number": 1})
    assert answers(router)[0] == [{"number": 1, "factor": 2.0}]
    router.take(1, {"kind": "gate", "name": "a", "number": 1})
    found = answers(router)
    assert {"number": 1, "factor": 3.0} in found[1]
    assert sum("tensors" in reply for replies in found.values() for reply in replies) == 2


def test_what_is_held_is_given_when_all_stand_still_and_that_is_written_down():
    router = Router(2, [{"a": 1.0, "b": 1.0}] * 2, hold=True)
    for rank in range(2):
        router.take(rank, {"kind": "gate", "name": "b", "number": 0})
        router.take(rank, collective(1, [1]))
        router.take(rank, wait(1))
    found = answers(router)
    assert all("tensors" in found[rank][-1] for rank in range(2))
    assert router.seen.waits == [[1], [1]]
    assert not router.seen.trouble


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "verdict", "passed": True},
        {"kind": "gate", "name": "no such gate", "number": 0},
        {"kind": "gate", "name": ["a"], "number": 0},
        collective(0, [1], op="all_recuce"),
        collective(0, [1], reduce="SUMM"),
        collective(0, [1], op=["all_reduce"]),
        collective(0, [1], op={"all_reduce": 1}),
        collective(0, [1], reduce=["SUM"]),
        collective("0", [1]),
        collective(0, [1], op="broadcast", root=7),
        collective(0, [1], op="send", reduce="", peer=None, tag=0),
        {"kind": "collective", "op": "all_reduce", "tensors": [1], "number": 0},
        {"kind": "waits", "for": None},
    ],
)
def test_what_no_link_sends_is_refused(message):
    with pytest.raises(WireError):
        Router(2, [{"a": 1.0}] * 2).take(0, message)


def test_many_messages_are_matched_in_time_proportional_to_their_number():
    def seconds(count):  # of the processor: other programs may interrupt, and do not count
        router = Router(2)
        started = time.process_time()
        for number in range(count):
            router.take(0, collective(number, [1], op="send", peer=1, tag=number))
        for number in range(count):
            tag = count - 1 - number
            router.take(1, collective(number, op="recv", peer=0, tag=tag, expects=[1]))
        assert len(router.replies) == 2 * count
        return time.process_time() - started

    assert min(seconds(4000) for _ in range(3)) < 30 * max(seconds(400), 0.01)


def test_groups_meet_by_themselves_and_a_missing_member_is_a_deadlock_with_its_name():
    router = Router(3)
    for rank in (0, 2):
        router.take(rank, collective(0, [rank], group="g", members=[0, 2]))
    found = answers(router)
    assert [found[rank][0]["tensors"][0].tolist() for rank in (0, 2)] == [[2], [2]]
    router.take(0, collective(1, [1], group="g", members=[0, 2]))
    router.take(0, wait(1))
    router.end(1, "returned")
    router.end(2, "returned")
    assert "rank 0 waits in all_reduce" in router.seen.trouble


def test_a_rank_that_piles_up_tensors_or_keys_is_refused():
    router = Router(2)
    big = np.zeros(2**24, "float32")
    message = collective(0, [1], op="send", peer=1, tag=0) | {"tensors": [big]}
    router.take(0, message)
    with pytest.raises(WireError, match="nobody has received"):
        router.take(0, message | {"number": 1})
    setting = {"kind": "store", "op": "set", "value": np.zeros(2**15, "uint8")}
    for number in (3, 4):
        router.take(0, setting | {"keys": [f"key {number}"], "number": number})
    with pytest.raises(WireError, match="for the store"):
        router.take(0, setting | {"keys": ["one more"], "number": 5})
