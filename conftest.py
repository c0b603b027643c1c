"""What holds for every test and chapter, on a machine that is busy with others of them."""

import os

import pytest
from hypothesis import settings

# One thread a process: each test starts processes that are as many as the cores, or more. Threads
# of several processes on one core wait for each other in a loop: what takes a second takes ten.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may wait for a core for longer than the fifth of a second that it is allowed.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

# What takes longest begins first, so that no worker is left with it at the end. Whole files go to
# a worker (--dist=loadfile), in the order of their first tests; the others keep their order.
LONGEST_FIRST = (
    "tests/torch_suite/test_torch_suite.py",
    "tests/grader/test_assignments.py",
    "tests/grader/test_corpus.py",
    "tests/labkit/testing/test_museum.py",
    "tests/test_benchmarks.py",
    "tests/labkit/launch/test_ranks.py",
    "tests/test_lab_mean_of_means.py",
    "book/speed/buckets_that_overlap.ipynb",
    "book/surprises/museum.ipynb",
    "tests/test_labs.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move the longest files to the front; the order within a file stays as it is."""
    places = [config.rootpath / name for name in LONGEST_FIRST]
    items.sort(key=lambda item: places.index(item.path) if item.path in places else len(places))
