"""Run a check of an implementation so that it ends on every rank with the same result.

`@invariant` turns a function into a check. If a rank launches another collective, the
implementation raises, or an assertion fails, the check raises `InvariantError` on every rank,
under the function's name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps

import torch
import torch.distributed as dist

from labkit.testing.agreement import InvariantError
from labkit.testing.trial import Wrap
from labkit.testing.watch import (
    CollectiveMismatchError,
    SameCollectives,
    WrittenInFlightError,
)

Device = torch.device | str
# Every rank of the default group must call it, with `(wrap, device="cpu", watched=None)`. Without
# `watched`, it creates a process group. Pass one to run many checks in a row.
Invariant = Callable[..., None]


def invariant(check: Callable[[Wrap, Device, SameCollectives], None]) -> Invariant:
    """Turn `check(wrap, device, watched)` into an `Invariant`, called with `(wrap, device="cpu")`.

    `check` must run the implementation's code, and nothing else, `with watched:`.
    """
    name = check.__name__

    @wraps(check)
    def checked(wrap: Wrap, device: Device = "cpu", watched: SameCollectives | None = None) -> None:
        own = SameCollectives(late=True) if watched is None else None
        watched = watched or own
        watched.launched.clear()
        try:
            check(wrap, device, watched)
        except InvariantError as error:
            raise replace(error, invariant=name) from None
        except CollectiveMismatchError as mismatch:
            raise _differ(mismatch, name) from None
        except Exception as error:
            cause = "the implementation does not support what is asked for here: see the exception."
            if isinstance(error, WrittenInFlightError):
                cause = (
                    "a buffer is used again before its collective has ended. Over a slow "
                    "connection, the other ranks get a part of what was written later."
                )
            found = f"it raised {type(error).__name__}: {error}"
            raise InvariantError(
                name, dist.get_rank(), "the training step", found, "a step", cause
            ) from error
        finally:
            if own:
                own.close()

    del checked.__wrapped__  # or help() would show the signature of `check`
    return checked


@contextmanager
def because(cause: str | None) -> Iterator[None]:
    """Give assertions that fail in the block the likely cause `cause`; None keeps their own."""
    try:
        yield
    except InvariantError as error:
        raise replace(error, cause=cause or error.cause) from None


def _differ(mismatch: CollectiveMismatchError, name: str) -> InvariantError:
    here = dist.get_rank()
    others = [f"rank {rank} {did}" for rank, did in enumerate(mismatch.went) if rank != here]
    return InvariantError(
        name,
        here,
        f"collective number {mismatch.number}",
        f"this rank {mismatch.went[here]}; {'; '.join(others)}",
        "the same collective on every rank",
        "what a rank launches depends on its own data: gradients that are None are skipped, or "
        "buckets are launched when they are full on this rank. Fix one order for all ranks.",
    )
