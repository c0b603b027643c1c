"""One rank server for all tests of the doctor, and scripts that a test writes itself."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doctor.corpus_runs import Script, Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Script]:
    def write(text: str, ranks: int = 2, launch: str = "torchrun") -> Script:
        path = tmp_path / "train.py"
        path.write_text(f"# doctor: expect=none ranks={ranks} launch={launch}\n{text}")
        return Script.read(path)

    return write
