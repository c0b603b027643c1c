"""No more ranks and workers than memory holds."""

import os
import sys

import psutil
import pytest

from labkit.launch import memory, nodes
from labkit.launch.memory import available_memory, check_memory
from labkit.launch.ranks import run_ranks
from labkit.launch.scripts import run_script

SENTENCE = (
    r"^8 ranks need about 1.2 GB of memory \(150 MB each\), and 0.6 GB are available, "
    "enough for 4: start fewer, or set LABKIT_MAX_RANKS=8 to start them anyway.$"
)


@pytest.fixture
def room_for_four(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 6.1e8)


def test_more_ranks_than_memory_holds_are_refused_in_one_sentence(room_for_four, monkeypatch):
    check_memory(4)
    with pytest.raises(ValueError, match=SENTENCE):
        run_ranks(lambda rank: rank, 8)
    for count in (1, 2):
        with pytest.raises(ValueError, match=SENTENCE):
            run_script("labs/accumulate_vs_ddp.py", ranks=8 // count, nodes=count)
        words = ["nodes", f"--nodes={count}", f"--nproc-per-node={8 // count}", "labs/none.py"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit, match=SENTENCE):
            nodes.main()


def test_a_variable_overrides_the_refusal_up_to_its_number(room_for_four, monkeypatch):
    monkeypatch.setenv(memory.OVERRIDE, "8")
    check_memory(8)
    with pytest.raises(ValueError, match="LABKIT_MAX_RANKS=9 to start them anyway"):
        check_memory(9)


def test_the_limit_of_a_control_group_counts(monkeypatch, tmp_path):
    (tmp_path / "self").write_text("7:pids:/\n0::/a/b\n")
    (group := tmp_path / "a").mkdir()
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("400\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 30\n")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "self")
    assert available_memory() == 630
    (group / "memory.max").write_text("max\n")
    assert available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize(
    ("cores", "quota", "gigabytes", "number"),
    [
        (2, None, 24, 3),
        (8, "max 100000", 24, 9),
        (64, "250000 100000", 24, 3),  # a container that may use two and a half cores
        (8, None, 0.5, 1),
        (1, "50000 100000", 24, 2),
    ],
)
def test_the_number_follows_the_cores_the_container_and_the_memory(
    cores, quota, gigabytes, number, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(memory, "available_memory", lambda: int(gigabytes * 1e9))
    monkeypatch.setattr(memory, "_QUOTA", tmp_path / "cpu.max")
    if quota:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert memory.workers() == number
