"""Calls of torch.distributed: what every rank calls, in which order, with what, and from where.

The gradients that DistributedDataParallel sends itself do not pass through these functions.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ddp_doctor.calls import CALLS, REDUCTIONS
from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.patching import Patches
from ddp_doctor.places import place

MAX_PER_WINDOW = 300


def install(recorder: Recorder, patches: Patches) -> None:
    session = recorder.session
    depth = [0]
    found: dict[Any, dict[str, Any]] = {}  # which gradient or parameter is where,
    moment = [0, 0]  # as of this step and this backward

    def enter(name: str) -> Any:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
            """Returns what the process was doing: a wrapper's backward goes on doing it."""
            depth[0] += 1
            if depth[0] > 1:
                return None
            recorder.open()
            doing = session.journal.text if session.journal is not None else None
            at = place(sys._getframe(1))
            tensor = _tensor(args, kwargs)
            shape = "" if tensor is None else f" of shape {list(tensor.shape)}"
            session.doing(f"{name}{shape} at {at}")
            recorder.collective_counts[name] = recorder.collective_counts.get(name, 0) + 1
            if recorder.on:
                operator = kwargs.get("op", args[1] if len(args) > 1 else None)
                note(name, at, tensor, operator)
            return doing

        return before

    def note(name: str, at: str, tensor: Tensor | None, operator: Any) -> None:
        room = len(recorder.window["collectives"]) < MAX_PER_WINDOW
        reduces = name in REDUCTIONS and recorder.expects_own_reduction()
        what = _what(tensor) if tensor is not None and (room or reduces) else {}
        if reduces and what.get("what") in ("gradient", "flat"):
            recorder.before_own_reduction(what.get("optimizer"), what.get("name", ""))
        if not room:
            return
        fact: dict[str, Any] = {"op": name, "place": at}
        if name == "all_reduce":
            fact["reduce"] = "sum" if operator is None else str(operator).split(".")[-1].lower()
        if tensor is not None:
            fact |= {"shape": list(tensor.shape)[:6], "numel": tensor.numel()} | what
        fact["backwards"] = recorder.so_far()
        fact["through_autograd"] = _in_autograd_function()
        if fact.get("what") == "loss" and tensor is not None and tensor.grad_fn is not None:
            recorder.mark_reduced_loss(tensor.grad_fn, fact)
        recorder.window["collectives"].append(fact)

    def leave(
        doing: str | None, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        depth[0] -= 1
        if depth[0] == 0:
            session.doing(doing or "running")

    def abandoned(error: BaseException) -> None:
        depth[0] = max(0, depth[0] - 1)

    def look() -> None:
        """Find out where gradients and parameters are now."""
        names = {
            id(parameter): {"name": name, "optimizer": state.index}
            for state in recorder.optimizers.values()
            for name, parameter in recorder.parameters_of(state)
        }
        found.clear()
        for key, parameter in recorder.known_parameters().items():
            if not hasattr(parameter, "placements"):
                found[_key(parameter)] = {"what": "parameter"}
                if parameter.grad is not None:
                    named = names.get(key, {"name": ""})
                    found[_key(parameter.grad)] = {"what": "gradient", **named}

    def _what(tensor: Tensor) -> dict[str, Any]:
        """Which of the run's tensors this is: gradient, parameter, loss, or something else."""
        now = [session.step_count, recorder.backward_count]
        if moment != now:
            moment[:] = now
            found.clear()
        known = found.get(_key(tensor))
        leaf = tensor.requires_grad and tensor.is_leaf
        if known is None and (leaf or (tensor.numel() > 1 and not tensor.requires_grad)):
            look()  # there are new gradients
            known = found.get(_key(tensor))
        if known is not None:
            return known
        if tensor.requires_grad:
            if tensor.numel() == 1:
                return {"what": "loss", "grad": torch.is_grad_enabled()}
            return {"what": "activation", "grad": torch.is_grad_enabled()}
        parameters = recorder.known_parameters().values()
        if tensor.dim() and tensor.numel() > 1:
            if tensor.numel() == sum(parameter.numel() for parameter in parameters):
                return {"what": "flat"}
            if any(tensor.shape == parameter.shape for parameter in parameters):
                return {"what": "like a gradient"}
        return {"what": "other"}

    for name in CALLS:
        before = enter(name)
        shared = getattr(dist, name, None) is getattr(distributed_c10d, name, None)
        patches.observe(distributed_c10d, name, before, leave, failed=abandoned)
        if not shared:
            patches.observe(dist, name, before, leave, failed=abandoned)
        elif hasattr(dist, name):  # the same function: torch compares some by identity
            patches.replace(dist, name, getattr(distributed_c10d, name))


def _key(tensor: Tensor) -> Any:
    """Where the tensor's data are; the tensor itself if they are in no one place to be read."""
    readable = tensor.device.type != "meta" and tensor.layout == torch.strided
    return (tensor.data_ptr() if readable else 0) or ("itself", id(tensor))


def _tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    for value in (*reversed(args[:2]), *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    return None


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
