"""Carry out asynchronous collectives as late as possible: when they are waited for.

A fast connection has often sent a small tensor before the program's next line runs, so a program
that reads, overwrites, or frees the tensor too early seems to work. `with late_collectives():`
makes that bug show each time. Only calls written `torch.distributed.all_reduce(…)` are delayed, not
those from C++, as in torch's DistributedDataParallel.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

_COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all_single"),
    *("all_gather_single", "all_gather_into_tensor"),
    *("reduce_scatter_single", "reduce_scatter_tensor"),
)


class WrittenInFlightError(Exception):
    """A tensor was changed or freed between the launch of a collective and the wait for it."""


class LateWork:
    """In the place of a `Work`. Whatever it is asked for, all that was launched is carried out."""

    def __init__(self, queue: list["LateWork"], launch: Callable[[], Any], sent: Any) -> None:
        self._queue, self._launch, self._work = queue, launch, None
        self._sent = [(one, one.detach().clone()) for one in tree_leaves(sent) if _is_tensor(one)]
        queue.append(self)

    def __getattr__(self, name: str) -> Any:
        while self._work is None:
            (self._queue or [self])[0].carry_out()
        return getattr(self._work, name)

    def carry_out(self) -> None:
        """Launch it, and wait. Raises WrittenInFlightError. To be called in launch order."""
        self._queue[:1] = []
        if not all(_is_unchanged(*pair) for pair in self._sent):
            raise WrittenInFlightError(
                "a tensor that is sent was changed or freed between the collective's launch and "
                "the wait for it: wait first, or use another buffer"
            )
        self._work = self._launch()
        self._work.wait(timedelta(0))  # the next one may use the same tensor


@contextmanager
def late_collectives(check: bool = True) -> Iterator[list[LateWork]]:
    """Delay collectives with `async_op=True` in this context.

    Yields those that have been launched and not carried out. Every rank has to enter and leave;
    what is never waited for is never carried out. With `check`, a wait raises WrittenInFlightError
    if the tensors have changed; otherwise what they hold by then is sent.
    """
    queue: list[LateWork] = []
    with ExitStack() as patches:
        for name in _COLLECTIVES:
            late = _delayed(getattr(dist, name), queue, check)
            patches.enter_context(mock.patch.object(dist, name, late))
        try:
            yield queue
        finally:
            queue.clear()


def _delayed(
    collective: Callable[..., Any], queue: list[LateWork], check: bool
) -> Callable[..., Any]:
    @wraps(collective)
    def launch(*args: Any, async_op: bool = False, **options: Any) -> Any:
        if async_op:
            again = partial(collective, *args, async_op=True, **options)
            return LateWork(queue, again, (args, options) if check else ())
        while queue:
            queue[0].carry_out()
        return collective(*args, **options)

    return launch


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_unchanged(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    if tensor.untyped_storage().nbytes() < before.numel() * before.element_size():
        return False
    same = (tensor == before) | ((tensor != tensor) & (before != before))
    return bool(same.all())
