"""Errors of the doctor's own in a process of a certificate end it; those of the script are its."""

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any


class DoctorErrors:
    """Ends the process on an error of the doctor's own, which no line of the script may catch.

    What the process still does is not wanted. `script_error`: the script's last error.
    """

    script_error: BaseException | None = None
    depth = 0  # hooks of the doctor that are running

    def guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook, inside of this."""

        @functools.wraps(hook)
        def call(*args: Any) -> Any:
            with self.in_hook():
                return hook(*args)

        return call

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """What torch raises inside is the doctor's error, too."""
        with self:
            self.depth += 1
            yield
            self.depth -= 1

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and error is not self.script_error:
            traceback.print_exception(error)
            first = f"The doctor failed: {type(error).__name__}: {error}".splitlines()[0]
            sys.stderr.write(f"{first}\n")
            leave(1)


def leave(code: int = 0) -> None:
    """End this process: nothing that the script still does is wanted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
