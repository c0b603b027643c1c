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

from ddp_doctor.certificate.record import StepNotes
from ddp_doctor.certificate.samples import Record
from ddp_doctor.facts.types import CALLS

Hook = Callable[..., None]


class Notebook(Protocol):
    """Where each call is noted: `steps.Steps`."""

    notes: StepNotes
    record: Record
    optimizers: list[Optimizer]
    turn_of_join: int
    combines: bool

    @property
    def turn(self) -> int: ...

    @property
    def updates(self) -> bool: ...

    def note_reduction(self, numbers: Any) -> None: ...


def hook_call(owner: Any, name: str, before: Hook | None = None, after: Hook | None = None) -> None:
    """Replace a function by one that calls it, with a hook before it, or after it."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = function(*args, **kwargs)
        if after is not None:
            after(result, *args, **kwargs)
        return result

    setattr(owner, name, call)


class Calls:
    """Replaces functions of torch by ones that note something, and call them."""

    def __init__(self, steps: Notebook) -> None:
        self.steps = steps
        self.joins = 0  # contexts of uneven inputs that have ended
        self.may_join = False  # whether there was one
        self._model: Callable[[], nn.Module | None] = lambda: None  # that was set to evaluate
        hook_call(Optimizer, "__init__", after=self._note_optimizer)
        for owner in (Optimizer, nn.Module):
            hook_call(owner, "zero_grad", before=self._note_zero_grad)
        hook_call(torch.autograd, "backward", before=self._note_backward)
        hook_call(nn.Module, "train", before=self._note_mode)
        hook_call(Join, "__enter__", before=self._note_join)
        hook_call(Join, "__exit__", after=self._note_end_of_join)
        if dist.is_available():
            for name in CALLS:
                if hasattr(dist, name):
                    hook_call(dist, name, before=self._note_collective)
            hook_call(dist, "all_reduce", after=self._note_all_reduce)
            hook_call(dist, "all_gather_object", after=self._note_all_gather)

    @property
    def evaluates(self) -> bool:
        """Whether the model that is trained is in evaluation mode now."""
        model = self._model()
        return model is not None and not model.training

    def _note_optimizer(self, _: None, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.steps.optimizers.append(optimizer)

    def _note_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.steps.notes.clears_gradients = True

    def _note_backward(self, *args: Any, **kwargs: Any) -> None:
        if not any(leaf.is_meta for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)):
            self.steps.notes.backwards += 1
            self.steps.record.modes.add(self.evaluates)

    def _note_mode(self, module: nn.Module, mode: bool = True) -> None:
        if not mode and self._has_all_that_is_trained(module):
            self._model = weakref.ref(module)

    def _has_all_that_is_trained(self, module: nn.Module) -> bool:
        parameters = set(map(id, module.parameters()))
        return bool(self.steps.optimizers) and all(
            id(parameter) in parameters
            for optimizer in self.steps.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _note_join(self, context: Any) -> None:
        self.may_join = True

    def _note_end_of_join(self, *args: Any) -> None:
        """A rank that was out of inputs stayed in there, and then got the others' model."""
        self.joins += 1
        self.steps.turn_of_join = self.steps.turn

    def _note_collective(self, *args: Any, **kwargs: Any) -> None:
        """An optimizer that calls a collective combines the ranks itself."""
        self.steps.combines |= self.steps.updates

    def _note_all_reduce(self, work: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if work is None:
            self.steps.note_reduction(tensor)

    def _note_all_gather(self, _: None, objects: list[Any], *args: Any, **kwargs: Any) -> None:
        if all(isinstance(number, int | float) for number in objects):
            self.steps.note_reduction(torch.tensor([float(sum(objects))], device="cpu"))
