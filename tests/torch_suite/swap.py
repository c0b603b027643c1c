"""The class swapped: every binding of torch's `DistributedDataParallel` becomes another class."""

import functools
import importlib
import os
import sys
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel

CLASSES = {
    "torch": "torch.nn.parallel.distributed:DistributedDataParallel",
    "miniddp": "miniddp.torch_drop_in:DistributedDataParallel",
}

_NEIGHBOURS = (
    "torch.distributed.algorithms.join",
    "torch.distributed.algorithms.model_averaging.averagers",
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook",
    "torch.distributed.algorithms._optimizer_overlap.optimizer_overlap",
    "torch.distributed.optim",
    "torch.distributed._composable.replicate",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel.ddp",
    "torch._dynamo",
)
"""Modules of torch that name the class; imported first, so that their names are swapped as well."""


def load(name: str) -> type:
    """The class of that name in `CLASSES`, or of a ``module:attribute`` path."""
    module, _, attribute = CLASSES.get(name, name).partition(":")
    return getattr(importlib.import_module(module), attribute)


def swap(cls: type) -> None:
    """Bind every name that stands for torch's class, in every module imported so far, to `cls`.

    A module that is imported later takes the class from one of these.
    """
    if cls is DistributedDataParallel:
        return
    for neighbour in _NEIGHBOURS:
        importlib.import_module(neighbour)
    own = sys.modules[cls.__module__].__name__.partition(".")[0]
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name == __name__ or name.partition(".")[0] == own:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is DistributedDataParallel:
                setattr(module, attribute, cls)
    if torch.nn.parallel.DistributedDataParallel is not cls:
        raise RuntimeError(f"torch.nn.parallel.DistributedDataParallel could not be set to {cls}")


class Constructions:
    """Counts how often the class is constructed in the processes of one test.

    A test that passes without constructing it says nothing about the class. The count is the length
    of a file, because the constructions happen in the ranks' processes.
    """

    path: str | None = None

    @classmethod
    def watch(cls, watched: type) -> None:
        construct = watched.__init__

        @functools.wraps(construct)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            if cls.path is not None:
                with open(cls.path, "ab", buffering=0) as file:
                    file.write(b".")
            construct(self, *args, **kwargs)

        watched.__init__ = __init__

    @classmethod
    def count(cls) -> int:
        return os.path.getsize(cls.path) if cls.path and os.path.exists(cls.path) else 0
