"""One fork server of ranks for all tests of the grader."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from grader.sandbox import RankServer, rank_server


@pytest.fixture(scope="session")
def server():
    with rank_server(trust=True) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def commands_share_the_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test runs in this process takes `server`, because starting another costs 3 s here.

    A command in its own process starts its own server.
    """

    @contextmanager
    def shared(*, trust: bool = False) -> Iterator[RankServer]:
        if trust:
            yield request.getfixturevalue("server")
        else:
            with rank_server() as own:
                yield own

    with pytest.MonkeyPatch.context() as patch:
        for user in ("grader.cli", "grader.student", "grader_notebooks"):
            patch.setattr(f"{user}.rank_server", shared)
        yield


@pytest.fixture(scope="session")
def walls(server):
    """The server, in a sandbox: hostile code (bombs, orphans) is run nowhere else.

    Where bubblewrap is not installed its tests cannot run, and say so. Where it is installed and
    does not work they fail: that is a bug of ours, or a machine that may not grade.
    """
    if server.isolation.startswith("none"):
        if shutil.which("bwrap") is None:
            pytest.skip("hostile code is run in a sandbox only: install bubblewrap")
        pytest.fail("bubblewrap is installed here, and the sandbox does not start in it")
    return server
