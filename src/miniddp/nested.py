"""The tensors in an input or output of a model: nested tuples, lists, dicts, and dataclasses."""

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


def find_tensors(value: Any) -> list[Tensor]:
    """All tensors in `value`, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in _parts(value).values() for tensor in find_tensors(part)]


def replace_tensors(value: Any, replacements: Iterator[Tensor]) -> Any:
    """A copy of `value` in which each tensor of `find_tensors(value)` is the next replacement."""
    if isinstance(value, Tensor):
        return next(replacements)
    parts = {key: replace_tensors(part, replacements) for key, part in _parts(value).items()}
    if not parts:
        return value
    if isinstance(value, tuple):
        values = parts.values()
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    replaced = copy.copy(value)
    indexed = isinstance(value, dict | list)
    assign = replaced.__setitem__ if indexed else partial(object.__setattr__, replaced)
    for key, part in parts.items():
        assign(key, part)
    return replaced


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with every floating-point tensor in `dtype`; unchanged if that is None."""
    if dtype is None:
        return value
    tensors = find_tensors(value)
    return replace_tensors(value, (t.to(dtype) if t.is_floating_point() else t for t in tensors))


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):  # first: a model output may be a dict and a dataclass
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return {}
