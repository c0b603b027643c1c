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

from ddp_doctor.certificate.samples import Recorded
from ddp_doctor.facts.types import CALLS

Call = Callable[..., Any]


class Notes(Protocol):
    """What is told of each call: `steps.Steps` implements it."""

    optimizers: list[Optimizer]
    recorded: Recorded
    backwards: int
    cleared: bool
    combines: bool

    @property
    def updating(self) -> bool: ...

    def begin_again(self) -> None: ...

    def note_reduced(self, numbers: Any) -> None: ...


class Calls:
    """Replaces functions of torch by ones that note something, and call them."""

    def __init__(self, steps: Notes) -> None:
        self.steps = steps
        self.joins = 0  # contexts of uneven inputs that have ended
        self.may_join = False  # whether there was one
        self._evaluated: Callable[[], nn.Module | None] = lambda: None
        self._replace(Optimizer, "__init__", self._making)
        for owner in (Optimizer, nn.Module):
            self._replace(owner, "zero_grad", self._clearing)
        self._replace(torch.autograd, "backward", self._passing)
        self._replace(nn.Module, "train", self._training)
        self._replace(Join, "__enter__", self._entering)
        self._replace(Join, "__exit__", self._leaving)
        if dist.is_available():
            for name in CALLS:
                if hasattr(dist, name):
                    self._replace(dist, name, self._combining)
            self._replace(dist, "all_reduce", self._reducing)
            self._replace(dist, "all_gather_object", self._gathering)

    def _replace(self, owner: Any, name: str, noting: Callable[[Call], Call]) -> None:
        call = getattr(owner, name)
        setattr(owner, name, functools.wraps(call)(noting(call)))

    @property
    def evaluates(self) -> bool:
        """Whether the model that is trained is in evaluation mode now."""
        model = self._evaluated()
        return model is not None and not model.training

    def _making(self, init: Call) -> Call:
        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self.steps.optimizers.append(optimizer)

        return make

    def _clearing(self, zero_grad: Call) -> Call:
        def clear(*args: Any, **kwargs: Any) -> None:
            self.steps.cleared = True
            zero_grad(*args, **kwargs)

        return clear

    def _passing(self, backward: Call) -> Call:
        def count(*args: Any, **kwargs: Any) -> None:
            if not any(leaf.is_meta for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)):
                self.steps.backwards += 1
                self.steps.recorded.modes.add(self.evaluates)
            backward(*args, **kwargs)

        return count

    def _training(self, train: Call) -> Call:
        def set_mode(module: nn.Module, mode: bool = True) -> nn.Module:
            if not mode and self._has_all_that_is_trained(module):
                self._evaluated = weakref.ref(module)
            trained: nn.Module = train(module, mode)
            return trained

        return set_mode

    def _has_all_that_is_trained(self, module: nn.Module) -> bool:
        there = set(map(id, module.parameters()))
        return bool(self.steps.optimizers) and all(
            id(parameter) in there
            for optimizer in self.steps.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _entering(self, enter: Call) -> Call:
        def begin(context: Any) -> Any:
            self.may_join = True
            return enter(context)

        return begin

    def _leaving(self, leave: Call) -> Call:
        """A rank that is out of inputs stays in here, and then gets the others' model."""

        def end(context: Any, *error: Any) -> Any:
            result = leave(context, *error)
            self.joins += 1
            self.steps.begin_again()
            return result

        return end

    def _combining(self, collective: Call) -> Call:
        """An optimizer that calls a collective combines the ranks itself."""

        def combine(*args: Any, **kwargs: Any) -> Any:
            self.steps.combines |= self.steps.updating
            return collective(*args, **kwargs)

        return combine

    def _reducing(self, all_reduce: Call) -> Call:
        def reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            work = all_reduce(tensor, *args, **kwargs)
            if work is None:
                self.steps.note_reduced(tensor)
            return work

        return reduce

    def _gathering(self, gather: Call) -> Call:
        def gathered(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
            gather(object_list, *args, **kwargs)
            if all(isinstance(number, int | float) for number in object_list):
                self.steps.note_reduced(torch.tensor([float(sum(object_list))], device="cpu"))

        return gathered
