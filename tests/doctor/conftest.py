"""One server for all tests of the doctor, and scripts that a test writes itself."""

from collections.abc import Callable, Iterator

import pytest
from doctor.harness.runs import Server
from doctor.harness.scripts import Script


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


@pytest.fixture
def script() -> Callable[..., Script]:
    def write(text: str, ranks: int = 2, launch: str = "torchrun") -> Script:
        return Script.of("train", f"# doctor: expect=none ranks={ranks} launch={launch}\n{text}")

    return write
