"""What holds for every test."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def signals_reach_what_a_test_starts() -> Iterator[None]:
    """A shell lets its background jobs ignore Ctrl-C, and nohup lets its command ignore a hang-up.

    Every process hands that on to those it starts, and tests ask how these end by both.
    """
    ends = [getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)]
    ignored = [each for each in ends if signal.getsignal(each) is signal.SIG_IGN]
    for each in ignored:
        handler = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
        signal.signal(each, handler)
    yield
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)
