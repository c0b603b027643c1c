"""What the benchmarks stand on: turns that all ranks count alike, pairs, and readable JSON."""

import ctypes
import json
import random
import resource
import statistics
import time
from unittest import mock

import pytest
import torch

from labkit.launch.ranks import run_ranks
from labkit.profiling import benchmark
from labkit.profiling.benchmark import (
    benchmark_models,
    paired_ratio,
    ratio_to_best,
    take_turns,
    write_json,
)


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
        with mock.patch.object(benchmark, "_busy", side_effect=(float(n) for n in range(1000))):
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


def test_against_the_best_of_equal_programs_none_seems_slow():
    draw = random.Random(0)

    def race() -> tuple[float, float]:
        ours, *others = ([draw.uniform(0.8, 1.2) for _ in range(12)] for _ in range(6))
        luckiest = max(paired_ratio(ours, other) for other in others)
        return luckiest, ratio_to_best(ours, dict(enumerate(others)))

    races = [race() for _ in range(300)]
    assert statistics.mean(luckiest for luckiest, _ in races) > 1.04
    assert statistics.mean(fair for _, fair in races) == pytest.approx(1.0, abs=0.02)


def test_against_a_program_that_is_faster_in_every_round_the_ratio_shows_it():
    slow, fast = [2.0, 4.0, 2.0, 4.0], [1.0, 2.0, 1.0, 2.0]
    assert ratio_to_best(slow, {"slow": slow, "fast": fast}) == 2.0


def test_a_paired_ratio_is_not_moved_by_rounds_that_were_slow_for_both():
    assert paired_ratio([1.0, 2.0, 30.0], [2.0, 4.0, 60.0]) == 0.5


def test_the_models_are_what_the_race_is_about():
    built = {name: model.module() for name, model in benchmark_models().items()}
    tensors = {name: [p.nbytes for p in module.parameters()] for name, module in built.items()}
    assert len(tensors["wide MLP"]) == 24
    assert len(tensors["600 small tensors"]) == 600
    assert sum(tensors["wide MLP"]) == pytest.approx(50e6, rel=0.02)
    assert sum(tensors["transformer"]) == pytest.approx(25e6, rel=0.02)


def test_written_figures_hold_the_machine_and_a_list_a_line(tmp_path):
    path = tmp_path / "new folder" / "figures.json"
    write_json(path, {"seconds": {"ours": [0.5, 1.5]}})
    read = json.loads(path.read_text())
    assert read["seconds"]["ours"] == [0.5, 1.5]
    assert read["machine"]["cores"] > 0
    assert '"ours": [ 0.5, 1.5 ]' in path.read_text()
    write_json(None, {"seconds": {}})


def turns_that_tell(rank: int) -> dict[str, list[float]]:
    def told() -> float:
        time.sleep(0.02)
        return 5.0 + rank

    return take_turns({"told": told, "counted": lambda: 7}, 2, lambda: None)


def test_a_program_that_tells_its_seconds_is_timed_by_them_and_the_slowest_rank_counts():
    for seconds in run_ranks(turns_that_tell, 2):
        assert seconds["told"] == [6.0, 6.0]
        assert max(seconds["counted"]) < 5


def orders_of_turns(rank: int, seed: int) -> str:
    called: list[str] = []
    programs = {name: lambda name=name: called.append(name) for name in "abcdef"}
    take_turns(programs, 2, lambda: None, seed=seed)
    return "".join(called)


def test_each_round_has_an_order_of_its_own_and_another_seed_gives_others():
    orders = [run_ranks(orders_of_turns, 2, seed) for seed in (0, 1, 0)]
    for first, second in orders:
        assert first == second
        assert first[:6] != first[6:]
    assert orders[0] == orders[2] != orders[1]


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


def unequal_blocks(rank: int) -> None:
    for blocks in (["ab"], ["ab", "bc"], ["abc", "d"]):
        with pytest.raises(ValueError, match="blocks"):
            take_turns({name: lambda: None for name in "abc"}, 1, lambda: None, blocks=blocks)


def test_blocks_hold_each_program_once():
    run_ranks(unequal_blocks, 2)


def faults_of_allocations(rank: int) -> tuple[int, int]:
    """Page faults of 100 allocations of 256 KiB, before and after `keep_freed_memory`."""

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.zeros(1 << 16) for _ in range(100)]
        del held
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    mallopt = ctypes.CDLL("libc.so.6").mallopt
    for option in (benchmark.M_TRIM_THRESHOLD, benchmark.M_MMAP_THRESHOLD):
        mallopt(option, 128 << 10)  # what glibc starts with; it would adapt to the allocations
    faults()
    returned = faults()
    benchmark.keep_freed_memory()
    for _ in range(5):  # until the heap is large enough
        faults()
    return returned, faults()


def test_memory_that_a_benchmark_frees_is_touched_again_without_page_faults():
    for returned, kept in run_ranks(faults_of_allocations, 2):
        assert returned > 6000
        assert kept < 600
