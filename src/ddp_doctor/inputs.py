"""The rows that a process's models are called with, so that two runs' samples can be compared.

Each outermost call of a module with parameters is looked at, by torch's global module hooks. A
*slot* is one tensor argument of one such module; its rows lie along dimension 0.
"""

import ctypes
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves

Rows = dict[str, list[str]]  # slot: a digest per row, in the order of the calls


class Inputs:
    """Records inside a `with` block. `shown` holds the beginning of each row, as text."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.shown: dict[str, str] = {}
        self.depth = 0
        self._modules: list[nn.Module] = []

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> Rows:
        """What was recorded since the last call of this method."""
        rows, self.rows = self.rows, {}
        return rows

    def _before(self, module: nn.Module, args: Any) -> None:
        self.depth += 1

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth > 0 or next(module.parameters(), None) is None:
            return
        inner = getattr(module, "module", module)  # of a wrapper
        if not any(inner is known for known in self._modules):
            self._modules.append(inner)
        number = next(at for at, known in enumerate(self._modules) if inner is known)
        named = [*enumerate(args), *sorted(kwargs.items())]
        for name, argument in named:
            for at, leaf in enumerate(tree_leaves(argument)):
                if type(leaf) in (Tensor, nn.Parameter) and leaf.dim() and len(leaf):
                    self._add(f"{number}.{name}.{at}", leaf.detach())

    def _add(self, slot: str, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        there = tensor.cpu().contiguous()
        size = there.numel() * there.element_size() // len(there)
        for at, row in enumerate(there):
            data = ctypes.string_at(there.data_ptr() + at * size, size)
            digest = hashlib.blake2b(data, digest_size=8).hexdigest()
            self.rows.setdefault(slot, []).append(digest)
            if digest not in self.shown:
                first = ", ".join(f"{value:.6g}" for value in row.flatten()[:4].tolist())
                self.shown[digest] = f"[{first}{', …' if row.numel() > 4 else ''}]"


def other_rows(
    first: Sequence[Rows], second: Sequence[Rows]
) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Per slot that differs, the rows that only the first has, and those that only the second has.

    Either is one entry per process. A slot that holds the same in every process of both is no
    sample: positions, a mask, a table.
    """
    found: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for slot in sorted({slot for rows in (*first, *second) for slot in rows}):
        parts = [rows.get(slot, []) for rows in (*first, *second)]
        if all(part == parts[0] for part in parts):
            continue
        ours, theirs = (
            Counter(row for rows in side for row in rows.get(slot, ())) for side in (first, second)
        )
        if ours != theirs:
            found[slot] = ours - theirs, theirs - ours
    return found
