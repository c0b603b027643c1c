"""Servers for all tests of the doctor, and scripts that a test writes itself."""

from collections.abc import Callable, Iterator

import pytest
from doctor.harness.runs import Server
from doctor.harness.scripts import Script

from ddp_doctor.certificate.forks import PRELOAD
from labkit.launch.forks import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Runs scripts under the doctor."""
    with Server("ddp_doctor.__main__", "ddp_doctor.observe.install") as one:
        yield one


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Certifies scripts."""
    one = ForkServer(*PRELOAD)
    yield one
    one.stop()


@pytest.fixture
def script() -> Callable[..., Script]:
    def write(text: str, ranks: int = 2, launch: str = "torchrun") -> Script:
        return Script.of("train", f"# doctor: expect=none ranks={ranks} launch={launch}\n{text}")

    return write
