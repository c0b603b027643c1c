"""A test whose body runs on ranks: `@on_ranks(2)` above `def test_...(rank)`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from labkit.launch.ranks import run_ranks

FILLED = ("rank", "world_size", "device")


def on_ranks(
    world_size: int, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test's body on every rank, by `run_ranks` with these options.

    Parameters named `rank`, `world_size`, and `device` are each rank's; all others are pytest's.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters
        others = [parameter for name, parameter in parameters.items() if name not in FILLED]

        @functools.wraps(body)
        def test(**values: Any) -> None:
            run_ranks(body, world_size, *(values[one.name] for one in others), **options)

        test.__signature__ = inspect.Signature(others)
        return test

    return decorate
