"""What holds for the tests of miniddp."""

from collections.abc import Iterator

import pytest
from persistent_ranks import persistent_ranks


@pytest.fixture(autouse=True, scope="module")
def ranks_stay() -> Iterator[None]:
    """Starting ranks takes longer than most of these tests do."""
    with persistent_ranks():
        yield
