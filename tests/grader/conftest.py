"""A sandbox in which bubblewrap works: hostile code is run nowhere else."""

import pytest

from grader.sandbox import Sandbox


@pytest.fixture
def sandbox():
    with Sandbox() as running:
        yield running
