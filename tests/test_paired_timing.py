"""What the benchmarks stand on: turns that all ranks count alike, pairs, and readable JSON."""

import time
from unittest import mock

import paired_timing
from labkit.launch.ranks import run_ranks
from paired_timing import take_turns


def turns(rank: int) -> tuple[dict[str, list[float]], list[str]]:
    called: list[str] = []

    def slow_on_rank_1() -> None:
        called.append("slow")
        if rank == 1:
            time.sleep(0.02)

    programs = {"slow": slow_on_rank_1, "fast": lambda: called.append("fast")}
    return take_turns(programs, 3, lambda: called.append("after")), called


def test_a_turn_lasts_until_the_slowest_rank_is_done_and_all_ranks_say_the_same():
    (first, called), (second, also_called) = run_ranks(turns, 2)
    assert first == second
    assert len(first["slow"]) == len(first["fast"]) == 3
    assert min(first["slow"]) >= 0.02
    assert called == also_called
    assert called[1::2] == ["after"] * 6
    assert sorted(called[::2]) == ["fast"] * 3 + ["slow"] * 3


def disturbed_turns(rank: int) -> tuple[int, int]:
    """How often a program is called for three rounds, where others are always busy."""
    counts = []
    for patience in (0.0, 0.05):
        called: list[float] = []
        program = {"one": lambda called=called: called.append(time.sleep(0.01))}
        with mock.patch.object(paired_timing, "_busy", side_effect=(float(n) for n in range(1000))):
            seconds = take_turns(program, 3, lambda: None, patience)
        assert len(seconds["one"]) == 3
        counts.append(len(called))
    return tuple(counts)


def test_disturbed_turns_are_taken_again_until_patience_is_spent():
    first, second = run_ranks(disturbed_turns, 2)
    assert first == second
    patiently = first[1]
    assert first[0] == 3
    assert 3 < patiently <= 3 + 5


def order_in_blocks(rank: int) -> list[str]:
    called: list[str] = []
    programs = {name: lambda name=name: called.append(name) for name in "abcdef"}
    take_turns(programs, 10, lambda: None, blocks=["ace", "bdf"])
    return called


def test_the_programs_of_a_block_take_turns_right_after_one_another_in_any_order():
    first, second = run_ranks(order_in_blocks, 2)
    assert first == second
    halves = ["".join(first[i : i + 3]) for i in range(0, 60, 3)]
    assert {"".join(sorted(half)) for half in halves} == {"ace", "bdf"}
    for a, b in zip(halves[::2], halves[1::2], strict=True):
        assert sorted(a + b) == sorted("abcdef")
    assert len(set(halves)) > 4  # both the blocks and the programs in them are shuffled
    assert {half[0] in "ace" for half in halves[::2]} == {True, False}
