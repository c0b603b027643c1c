"""The ranks of these tests stay."""

from persistent_ranks import ranks_stay  # noqa: F401, a fixture
