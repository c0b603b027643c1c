"""Errors of the doctor's own in a process of a certificate end it; those of the script are its."""

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any


class OwnErrors:
    """Ends the process on an error of the doctor's own, which no line of the script may catch.

    What the process still does is not wanted. `of_script`: the script's last error.
    """

    of_script: BaseException | None = None
    hooks = 0  # of the doctor that are running

    def guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook, inside of this."""

        @functools.wraps(hook)
        def guarded(*args: Any) -> Any:
            with self.in_hook():
                return hook(*args)

        return guarded

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """What torch raises inside is the doctor's error, too."""
        with self:
            self.hooks += 1
            yield
            self.hooks -= 1

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and error is not self.of_script:
            traceback.print_exception(error)
            first = f"The doctor failed: {type(error).__name__}: {error}".splitlines()[0]
            sys.stderr.write(f"{first}\n")
            leave(1)


def leave(code: int = 0) -> None:
    """End this process: nothing that the script still does is wanted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
