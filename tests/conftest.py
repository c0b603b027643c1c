"""What holds for every test."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Where one set of ranks serves all tests of a file: to start some takes longer than most tests do.
RANKS_STAY = tuple(Path(__file__).parent / place for place in ("miniddp", "labkit/testing"))


@pytest.fixture(autouse=True, scope="module")
def ranks_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    """FRESH_RANKS=1 in the environment starts them for each test, which says where a hang is."""
    with contextlib.ExitStack() as stack:
        here = any(request.path.is_relative_to(place) for place in RANKS_STAY)
        if here and not os.environ.get("FRESH_RANKS"):
            from persistent_ranks import persistent_ranks  # with torch

            stack.enter_context(persistent_ranks())
        yield


@pytest.fixture(autouse=True, scope="session")
def signals_reach_what_a_test_starts() -> Iterator[None]:
    """A shell lets its background jobs ignore Ctrl-C and SIGQUIT, and nohup ignores a hang-up.

    Every process hands that on to those it starts, and tests ask how these end by them.
    """
    names = ("SIGINT", "SIGQUIT", "SIGHUP")
    ends = [getattr(signal, name) for name in names if hasattr(signal, name)]
    ignored = [each for each in ends if signal.getsignal(each) is signal.SIG_IGN]
    for each in ignored:
        handler = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
        signal.signal(each, handler)
    yield
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)
