"""What holds for every test and chapter, on a machine that is busy with others of them."""

import contextlib
import gc
import itertools
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from labkit.launch.forks import shared_server
from labkit.launch.memory import workers

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
# `pytest --store-longest` measures them: of the files that it runs, those over LONG seconds.
LONGEST_FIRST = Path(__file__).parent / "tests" / "longest_first.txt"
LONG = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-longest", action="store_true", help=f"write {LONGEST_FIRST.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Let all workers, and all that tests start, fork their ranks from one process."""
    if not hasattr(config, "workerinput"):
        sharing = contextlib.ExitStack()
        sharing.enter_context(shared_server())
        config.add_cleanup(sharing.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move the longest files to the front; the order within a file stays as it is."""
    places = [config.rootpath / name for name in LONGEST_FIRST.read_text().split()]
    items.sort(key=lambda item: places.index(item.path) if item.path in places else len(places))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many as chapters of a book."""
    return workers()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the tests that take long and are in `make test`; store the files that take longest."""
    took, of_files = Counter[str](), Counter[str]()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            of_files[report.nodeid.partition("::")[0]] += report.duration
            if "slow" not in report.keywords and ".ipynb" not in report.nodeid:
                took[report.nodeid] += report.duration
    if long := [(name, time) for name, time in took.most_common() if time > SLOW]:
        terminalreporter.section(f"took over {SLOW} s, without the mark slow")
        for name, time in long:
            terminalreporter.write_line(f"{time:6.1f} s  {name}")
    if config.getoption("--store-longest"):
        longest = [name for name, time in of_files.most_common() if time > LONG]
        LONGEST_FIRST.write_text("".join(f"{name}\n" for name in longest))


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
