"""One chapter or test more than there are cores, and no more than memory holds."""

import os

import pytest

from labkit.launch import concurrency


@pytest.mark.parametrize(
    ("cores", "quota", "gigabytes", "number"),
    [
        (2, None, 24, 3),
        (8, None, 24, 9),
        (8, "max 100000", 24, 9),
        (64, "250000 100000", 24, 3),  # a container that may use two and a half cores
        (8, None, 4, 2),
        (8, None, 0.5, 1),
        (1, "50000 100000", 24, 2),
    ],
)
def test_the_number_follows_the_cores_the_container_and_the_memory(
    cores, quota, gigabytes, number, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(concurrency, "available_memory", lambda: int(gigabytes * 1e9))
    monkeypatch.setattr(concurrency, "_QUOTA", tmp_path / "cpu.max")
    if quota:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert concurrency.workers() == number
