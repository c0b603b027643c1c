"""What the script calls in torch, noted for `steps`: passes, reductions, modes, Join."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ddp_doctor.certificate.record import Noted
from ddp_doctor.certificate.samples import Recorded
from ddp_doctor.facts.types import CALLS

Note = Callable[..., None]


class Notes(Protocol):
    """What is told of each call: `steps.Steps` implements it."""

    noted: Noted
    recorded: Recorded
    optimizers: list[Optimizer]
    taken: dict[int, int]
    before_join: dict[int, int]
    combines: bool

    @property
    def updating(self) -> bool: ...

    def note_reduced(self, numbers: Any) -> None: ...


def noted(owner: Any, name: str, before: Note | None = None, after: Note | None = None) -> None:
    """Replace a function by one that calls it, and notes before it, or after it with the result."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = call(*args, **kwargs)
        if after is not None:
            after(result, *args, **kwargs)
        return result

    setattr(owner, name, called)


class Calls:
    """Replaces functions of torch by ones that note something, and call them."""

    def __init__(self, steps: Notes) -> None:
        self.steps = steps
        self.joins = 0  # contexts of uneven inputs that have ended
        self.may_join = False  # whether there was one
        self._evaluated: Callable[[], nn.Module | None] = lambda: None
        noted(Optimizer, "__init__", after=self._made)
        for owner in (Optimizer, nn.Module):
            noted(owner, "zero_grad", before=self._clears)
        noted(torch.autograd, "backward", before=self._passes)
        noted(nn.Module, "train", before=self._sets_mode)
        noted(Join, "__enter__", before=self._enters)
        noted(Join, "__exit__", after=self._left)
        if dist.is_available():
            for name in CALLS:
                if hasattr(dist, name):
                    noted(dist, name, before=self._combines)
            noted(dist, "all_reduce", after=self._reduced)
            noted(dist, "all_gather_object", after=self._gathered)

    @property
    def evaluates(self) -> bool:
        """Whether the model that is trained is in evaluation mode now."""
        model = self._evaluated()
        return model is not None and not model.training

    def _made(self, _: None, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.steps.optimizers.append(optimizer)

    def _clears(self, *args: Any, **kwargs: Any) -> None:
        self.steps.noted.cleared = True

    def _passes(self, *args: Any, **kwargs: Any) -> None:
        if not any(leaf.is_meta for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)):
            self.steps.noted.backwards += 1
            self.steps.recorded.modes.add(self.evaluates)

    def _sets_mode(self, module: nn.Module, mode: bool = True) -> None:
        if not mode and self._has_all_that_is_trained(module):
            self._evaluated = weakref.ref(module)

    def _has_all_that_is_trained(self, module: nn.Module) -> bool:
        there = set(map(id, module.parameters()))
        return bool(self.steps.optimizers) and all(
            id(parameter) in there
            for optimizer in self.steps.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _enters(self, context: Any) -> None:
        self.may_join = True

    def _left(self, *args: Any) -> None:
        """A rank that was out of inputs stayed in there, and then got the others' model."""
        self.joins += 1
        self.steps.before_join = dict(self.steps.taken)

    def _combines(self, *args: Any, **kwargs: Any) -> None:
        """An optimizer that calls a collective combines the ranks itself."""
        self.steps.combines |= self.steps.updating

    def _reduced(self, work: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if work is None:
            self.steps.note_reduced(tensor)

    def _gathered(self, _: None, object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        if all(isinstance(number, int | float) for number in object_list):
            self.steps.note_reduced(torch.tensor([float(sum(object_list))], device="cpu"))
