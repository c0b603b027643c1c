"""Calls of torch.distributed: what every rank calls, in which order, with what, and from where.

The gradients that DistributedDataParallel sends itself do not pass through these functions.
"""

import sys
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import device_mesh, distributed_c10d

from ddp_doctor.facts.places import place
from ddp_doctor.facts.types import CALLS, REDUCTIONS, CollectiveFact
from ddp_doctor.observe.patching import Args, Kwargs, Patches
from ddp_doctor.observe.recorder import Recorder

MAX_PER_WINDOW = 300
AUTOGRAD = (  # functional collectives that carry gradients
    *("all_gather_tensor_autograd", "reduce_scatter_tensor_autograd"),
    "all_to_all_single_autograd",
)


def install(recorder: Recorder, patches: Patches) -> None:
    if not dist.is_available():
        return
    calls = _Calls(recorder)
    for owner in (distributed_c10d, dist, device_mesh):
        patches.observe(owner, "init_process_group", calls.joining, calls.joined)
        patches.observe(owner, "destroy_process_group", calls.leaving, calls.left)
    for name in AUTOGRAD:
        before = calls.enter(name)
        patches.observe(functional, name, before, calls.leave, failed=calls.abandoned)
    for name in CALLS:
        before = calls.enter(name)
        shared = getattr(dist, name, None) is getattr(distributed_c10d, name, None)
        patches.observe(distributed_c10d, name, before, calls.leave, failed=calls.abandoned)
        if not shared:
            patches.observe(dist, name, before, calls.leave, failed=calls.abandoned)
        elif hasattr(dist, name):  # the same function: torch compares some by identity
            patches.replace(dist, name, getattr(distributed_c10d, name))


class What(TypedDict, total=False):
    """Which of the run's tensors a collective is given: part of a `CollectiveFact`."""

    what: str
    name: str
    optimizer: int
    grad: bool


class _Calls:
    """The calls of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.depth = 0
        self.found: dict[Any, What] = {}  # which gradient or parameter is where,
        self.moment = [0, 0]  # as of this step and this backward

    def joining(self, args: Args, kwargs: Kwargs) -> None:
        """A process group is about to be made, or has been (`joined`)."""
        self.recorder.session.open()
        self.recorder.grouped = False
        self.recorder.session.set_status(f"init_process_group at {place()}")

    def joined(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        self.recorder.open()
        self.recorder.session.set_status("running")

    def leaving(self, args: Args, kwargs: Kwargs) -> None:
        """A process group is about to be destroyed, or has been (`left`)."""
        self.recorder.session.set_status(f"destroy_process_group at {place()}")

    def left(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        self.recorder.grouped = dist.is_initialized()  # False unless it was another group
        self.recorder.session.set_status("running")

    def enter(self, name: str) -> Any:
        recorder, session = self.recorder, self.recorder.session

        def before(args: Args, kwargs: Kwargs) -> Any:
            """Returns what the process was doing: a wrapper's backward goes on doing it."""
            self.depth += 1
            if self.depth > 1:
                return None
            recorder.open()
            doing = session.journal.text if session.journal is not None else None
            at = place(sys._getframe(1))
            tensor = _tensor(args, kwargs)
            shape = "" if tensor is None else f" of shape {list(tensor.shape)}"
            session.set_status(f"{name}{shape} at {at}")
            recorder.collective_count += 1
            if recorder.on:
                self.note(name, at, tensor, args, kwargs)
            return doing

        return before

    def note(
        self,
        name: str,
        at: str,
        tensor: Tensor | None,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        """Write a call down."""
        recorder = self.recorder
        group = _ranks_of(args, kwargs)
        room = len(recorder.window["collectives"]) < MAX_PER_WINDOW
        reduces = name in REDUCTIONS
        what: What = self.what(tensor) if tensor is not None and (room or reduces) else {}
        of_gradients = what.get("what") in ("gradient", "flat", "like a gradient")
        if recorder.in_step and reduces and (of_gradients or "scatter" in name):
            recorder.combined_in_step(at)
        if reduces and what.get("what") in ("gradient", "flat"):
            recorder.before_own_reduction(what.get("optimizer"), what.get("name", ""))
        if not room:
            return
        fact = CollectiveFact(
            op=name,
            place=at,
            backwards=recorder.so_far(),
            through_autograd=name in AUTOGRAD or (not _by_fsdp() and _in_autograd_function()),
            in_backward=recorder.in_backward > 0,
        )
        fact.update(what)  # type: ignore[typeddict-item]
        if group is not None:
            fact["group"] = group
        if tensor is not None:
            fact["shape"], fact["numel"] = list(tensor.shape)[:6], tensor.numel()
        carries = fact.get("what") in ("loss", "activation")
        if carries and tensor is not None and tensor.grad_fn is not None:
            recorder.mark_reduced_loss(tensor.grad_fn, fact)
        recorder.window["collectives"].append(fact)

    def leave(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.recorder.session.set_status(token or "running")

    def abandoned(self, error: BaseException) -> None:
        self.depth = max(0, self.depth - 1)

    def look(self) -> None:
        """Find out where gradients and parameters are now."""
        recorder = self.recorder
        names: dict[int, What] = {
            id(parameter): {"what": "gradient", "name": name, "optimizer": state.index}
            for state in recorder.optimizers.values()
            for name, parameter in recorder.parameters_of(state)
        }
        self.found.clear()
        for key, parameter in recorder.known_parameters().items():
            if not hasattr(parameter, "placements"):
                self.found[_key(parameter)] = {"what": "parameter"}
            if parameter.grad is not None:
                other: What = {"what": "gradient", "name": ""}
                self.found[_key(_own_part(parameter.grad))] = names.get(key, other)

    def what(self, tensor: Tensor) -> What:
        """Which of the run's tensors this is: gradient, parameter, loss, or something else."""
        recorder = self.recorder
        now = [recorder.session.step_count, recorder.backward_count]
        if self.moment != now:
            self.moment[:] = now
            self.found.clear()
        key = _key(_own_part(tensor))
        known = self.found.get(key)
        leaf = tensor.requires_grad and tensor.is_leaf
        if known is None and (leaf or (tensor.numel() > 1 and not tensor.requires_grad)):
            self.look()  # there are new gradients
            known = self.found.get(key)
        if known is not None:
            return known
        if tensor.requires_grad:
            kind = "loss" if tensor.numel() == 1 else "activation"
            return {"what": kind, "grad": torch.is_grad_enabled()}
        parameters = recorder.known_parameters().values()
        if tensor.dim() and tensor.numel() > 1:
            if tensor.numel() == sum(parameter.numel() for parameter in parameters):
                return {"what": "flat"}
            if any(tensor.shape == parameter.shape for parameter in parameters):
                return {"what": "like a gradient"}
        return {"what": "other"}


def _own_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; the tensor itself of any other."""
    return tensor.detach().to_local() if hasattr(tensor, "placements") else tensor


def _key(tensor: Tensor) -> Any:
    """Where the tensor's data are; the tensor itself if they are in no one place to be read."""
    readable = tensor.device.type != "meta" and tensor.layout == torch.strided
    return (tensor.data_ptr() if readable else 0) or ("itself", id(tensor))


def _tensor(args: Args, kwargs: Kwargs) -> Tensor | None:
    values = (*reversed(args[:2]), *kwargs.values())
    return next((value for value in values if isinstance(value, Tensor)), None)


def _ranks_of(args: Args, kwargs: Kwargs) -> list[int] | None:
    """The ranks that take part; None if all do."""
    groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
    if not groups or groups[0] is dist.group.WORLD:
        return None
    ranks = dist.get_process_group_ranks(groups[0])
    return sorted(ranks) if len(ranks) < dist.get_world_size() else None


def _by_fsdp() -> bool:
    """Whether fully_shard makes this call, to gather parameters or to combine gradients."""
    frame: Any = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return False
        if "torch.distributed.fsdp._fully_shard" in frame.f_globals.get("__name__", ""):
            return True
        frame = frame.f_back
    return False


def _in_autograd_function() -> bool:
    """Whether a caller is the forward or the backward of an autograd Function."""
    frame: Any = sys._getframe(4)
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_code.co_name in ("forward", "backward") and frame.f_code.co_varnames:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(first, torch.autograd.function.FunctionCtx):
                return True
        frame = frame.f_back
    return False
