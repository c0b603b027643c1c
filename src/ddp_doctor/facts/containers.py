"""The tensors in what a forward is given, or a loader returns."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

MAX_DEPTH = 6
VALUES = 12  # that are looked at for each tensor that may be found


def tensors_in(batch: Any, most: int = 16) -> list[Tensor]:
    """The first `most` tensors, also inside containers and a user's objects.

    Looks at `VALUES` values for each, down to `MAX_DEPTH` levels.
    """
    found: list[Tensor] = []
    left = VALUES * most

    def look(value: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        if isinstance(value, Tensor):
            if not value.is_nested:  # it has no shape
                found.append(value)
        elif depth < MAX_DEPTH:
            # A copy: another thread may add to the container.
            for inner in list(islice(_inside(value), left)):
                if left <= 0 or len(found) >= most:
                    return
                look(inner, depth + 1)

    look(batch, 0)
    return found


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, nn.Module | type):
        return ()
    attributes = getattr(value, "__dict__", None)  # a dataclass, a UserDict, a graph
    held = list(dict.values(attributes)) if isinstance(attributes, dict) else []
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        held += [getattr(value, name, None) for name in names]
    return held


def transforming() -> bool:
    """Whether this is inside of vmap or grad of torch.func, where tensors have no values to read.

    torch says so only privately.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None
