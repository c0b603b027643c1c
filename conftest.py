"""What holds for every test and chapter, on a machine that is busy with others of them."""

import contextlib
import gc
import itertools
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from labkit.launch.concurrency import workers
from labkit.launch.forks import shared_server

# One thread per process: each test starts processes that are as many as the cores, or more. Threads
# of several processes on one core wait for each other in a loop: what takes a second takes ten.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test asks the network for a model. The library reads this when a server loads it, for all.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Why: labkit.launch.fork_server.schedule_as_batch. The processes that tests start inherit it.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# An example may wait for a core for longer than it is allowed to take, and so may drawing it. The
# examples are the same in each run, so that a failure belongs to a change and not to a lucky draw.
settings.register_profile(
    "busy machine",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("busy machine")

SLOW = 10  # seconds, with the other workers' tests beside it

# What takes longest starts first, so that no worker is left with it at the end. Whole files go to a
# worker (--dist=loadfile), in the order of their first tests (--no-loadscope-reorder; otherwise
# pytest-xdist sorts them by their number of tests). The others keep their order.
LONGEST_FIRST = (
    "tests/grader/test_release.py",
    "tests/torch_suite/test_torch_suite.py",
    "tests/grader/test_hostile.py",
    "tests/grader/test_right.py",
    "tests/test_labs.py",
    "tests/test_benchmarks.py",
    "tests/miniddp/test_ladder.py",
    "tests/test_lab_results.py",
    "book/puzzles/accumulate_vs_ddp.ipynb",
    "book/start/what_is_averaged.ipynb",
    "book/surprises/museum.ipynb",
    "book/scale/when_a_node_fails.ipynb",
    "book/build/the_wrapper.ipynb",
    "tests/labkit/launch/test_ranks.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let all workers, and all that tests start, fork their ranks from one process."""
    if not hasattr(config, "workerinput"):
        sharing = contextlib.ExitStack()
        sharing.enter_context(shared_server())
        config.add_cleanup(sharing.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move the longest files to the front; the order within a file stays as it is."""
    places = [config.rootpath / name for name in LONGEST_FIRST]
    if gone := [str(place) for place in places if not place.is_file()]:
        raise pytest.UsageError(f"LONGEST_FIRST in conftest.py names no file: {', '.join(gone)}")
    items.sort(key=lambda item: places.index(item.path) if item.path in places else len(places))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many as chapters of a book."""
    return workers()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that take long and are in `make test`."""
    took: dict[str, float] = {}
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport) and "slow" not in report.keywords:
            took[report.nodeid] = took.get(report.nodeid, 0) + report.duration
    long = {name: time for name, time in took.items() if time > SLOW and ".ipynb" not in name}
    if long:
        terminalreporter.section(f"took over {SLOW} s, without the mark slow")
    for name in sorted(long, key=long.__getitem__, reverse=True):
        terminalreporter.write_line(f"{long[name]:6.1f} s  {name}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn the garbage collector off while tests are collected, and keep it from what that loaded.

    The modules that are imported here stay until the end. To walk through them again and again
    would take a third of each worker's processor time during collection, and free nothing.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
