"""One fork server of ranks for all tests of the grader."""

from __future__ import annotations

import pytest

from grader.sandbox import rank_server


@pytest.fixture(scope="session")
def server():
    with rank_server(trust=True) as running:
        yield running
