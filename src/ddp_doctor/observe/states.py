"""What is remembered of the run's own objects, without keeping any of them alive."""

import weakref
from typing import Any, NotRequired, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ddp_doctor.facts.types import BackwardFact, ChangeFact, Projections, SnapshotFact


class Numbers:
    """A number per object, also if a later object has an earlier one's id."""

    def __init__(self) -> None:
        self._seen = WeakIdKeyDictionary()
        self._count = 0

    def of(self, obj: Any) -> int:
        if obj not in self._seen:
            self._seen[obj] = self._count
            self._count += 1
        return int(self._seen[obj])


class Backward(BackwardFact):
    """A backward with what is not written down."""

    reached: NotRequired[set[int]]  # parameters, by id
    used: NotRequired[bool]  # by the step of an optimizer


def as_facts(records: list[Backward]) -> list[BackwardFact]:
    """What is written down."""
    kept = [{k: v for k, v in one.items() if k not in ("reached", "used")} for one in records]
    return cast(list[BackwardFact], kept)


class OptimizerState:
    """One optimizer: how often it stepped, and the backward passes since its last step."""

    def __init__(self, optimizer: Any, index: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.index = index
        self.steps = 0
        self.last = 0  # the number of its last step, counted over all optimizers
        self.pending: list[Backward] = []
        self.snapshot: SnapshotFact | None = None  # of the gradients, before they are clipped
        self.left: Projections | None = None  # the gradients that the last backward left
        self.cleared = 0  # backwards since its last step whose gradients were cleared
        self.leftover = 0  # parameters that held the last step's gradient at the first of `pending`
        self.cut = False  # whether there were more backwards than `pending` may hold
        self.numbers: list[dict[str, float]] = []  # each group's hyperparameters
        self.trained: list[bool] = []  # of each parameter
        self.changes = 0  # of `numbers`
        self.scale: float | None = None  # what GradScaler.unscale_ divided the gradients by
        self.reduced: set[str] = set()  # the gradients that the script has combined itself
        self.done: set[str] = set()

    def parameters(self) -> list[Tensor]:
        """What it steps; nothing once it is gone."""
        optimizer = self.optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def forget(self) -> None:
        """The gradients were used or cleared: nothing of them is left to write down."""
        self.pending = []
        self.snapshot = self.left = self.scale = None
        self.leftover = 0
        self.cut = False
        self.reduced = set()


class WrapperState:
    """One DistributedDataParallel-like wrapper, as it was when it was made."""

    def __init__(self, wrapper: Any, module: Any, index: int) -> None:
        self.wrapper = weakref.ref(wrapper)
        # The nodes in `at_start` keep their parameters alive, so they must not outlive the module.
        self.module = weakref.ref(module, lambda _: self.at_start.clear())
        self.index = index
        self.prepared: bool | None = None
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.at_start = {
            name: (
                weakref.ref(parameter),
                parameter.requires_grad,
                str(parameter.dtype),
                accumulator(parameter),
                parameter.shape,
            )
            for name, parameter in module.named_parameters()
            if name not in ignored
        }
        self.ignored = ignored

    def changes(self) -> list[ChangeFact]:
        """Parameters that are not what they were when the model was wrapped."""
        module = self.module()
        if module is None:
            return []
        found: dict[str, str] = {}
        for name, parameter in module.named_parameters():
            if name in self.ignored or hasattr(parameter, "placements"):
                continue
            if name not in self.at_start:
                if parameter.requires_grad:
                    found[name] = "new"
                continue
            reference, trained, dtype, node, shape = self.at_start[name]
            if reference() is not parameter:
                found[name] = "replaced" if parameter.shape == shape else "new"
            elif parameter.requires_grad and not trained:
                found[name] = "unfrozen"
            elif str(parameter.dtype) != dtype:
                found[name] = f"converted from {dtype} to {parameter.dtype}"
            elif (
                parameter.requires_grad and node is not None and accumulator(parameter) is not node
            ):
                found[name] = "moved"
        return [ChangeFact(name=name, how=how) for name, how in list(found.items())[:50]]


def accumulator(parameter: Tensor) -> Any:
    """The node that adds a gradient to `parameter.grad`: DDP's hooks are on it."""
    if not parameter.requires_grad or hasattr(parameter, "placements"):
        return None
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(parameter).node
