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
    count = [0]

    def enter(name: str) -> Any:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            depth[0] += 1
            if depth[0] > 1:
                return None
            recorder.open()
            at = place(sys._getframe(1))
            tensor = _tensor(args, kwargs)
            shape = "" if tensor is None else f" of shape {list(tensor.shape)}"
            count[0] += 1
            session.doing(f"{name}{shape} at {at}")
            recorder.collective_counts[name] = recorder.collective_counts.get(name, 0) + 1
            if name == "all_reduce" and tensor is not None and recorder.is_parameters(tensor):
                recorder.note_average(at)
            if not recorder.on:
                return None
            room = len(recorder.window["collectives"]) < MAX_PER_WINDOW
            reduces = name in REDUCTIONS and recorder.expects_own_reduction()
            what = _what(tensor) if tensor is not None and (room or reduces) else {}
            if reduces and what.get("what") in ("gradient", "flat"):
                recorder.before_own_reduction(what.get("optimizer"), what.get("name", ""))
            if not room:
                return None
            fact: dict[str, Any] = {"op": name, "place": at}
            operator = kwargs.get("op", args[1] if name == "all_reduce" and len(args) > 1 else None)
            if name == "all_reduce":
                fact["reduce"] = "sum" if operator is None else str(operator).split(".")[-1].lower()
            if tensor is not None:
                fact |= {"shape": list(tensor.shape)[:6], "numel": tensor.numel()}
                fact |= what
            fact["backwards"] = recorder.so_far()
            fact["through_autograd"] = _in_autograd_function()
            if fact.get("what") == "loss" and tensor is not None and tensor.grad_fn is not None:
                recorder.mark_reduced_loss(tensor.grad_fn, fact)
            recorder.window["collectives"].append(fact)
            return None

        return before

    def leave(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        depth[0] -= 1
        if depth[0] == 0:
            session.doing("running")

    def abandoned(error: BaseException) -> None:
        depth[0] = max(0, depth[0] - 1)

    def _what(tensor: Tensor) -> dict[str, Any]:
        """Which of the run's tensors this is: gradient, parameter, loss, or something else."""
        address = _address(tensor)
        for parameter in recorder.known_parameters().values():
            if hasattr(parameter, "placements"):
                continue
            grad = parameter.grad
            if grad is not None and (grad is tensor or (address and _address(grad) == address)):
                for state in recorder.optimizers.values():
                    named = recorder.parameters_of(state)
                    name = next((n for n, p in named if p is parameter), None)
                    if name:
                        return {"what": "gradient", "name": name, "optimizer": state.index}
                return {"what": "gradient", "name": ""}
            if address and _address(parameter) == address:
                return {"what": "parameter"}
        if tensor.requires_grad:
            if tensor.numel() == 1:
                return {"what": "loss", "grad": torch.is_grad_enabled()}
            return {"what": "activation", "grad": torch.is_grad_enabled()}
        known = recorder.known_parameters().values()
        if tensor.dim() and tensor.numel() > 1:
            if tensor.numel() == sum(parameter.numel() for parameter in known):
                return {"what": "flat parameters" if recorder.is_parameters(tensor) else "flat"}
            if any(tensor.shape == parameter.shape for parameter in known):
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


def _address(tensor: Tensor) -> int:
    """Where the tensor's data are; 0 if they are not in one place that can be read."""
    readable = tensor.device.type != "meta" and tensor.layout == torch.strided
    return tensor.data_ptr() if readable else 0


def _tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    for value in (*reversed(args[:2]), *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    return None


def _in_autograd_function() -> bool:
    """Whether a caller is the forward or the backward of an autograd Function."""
    frame: Any = sys._getframe(3)
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_code.co_name in ("forward", "backward") and frame.f_code.co_varnames:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(first, torch.autograd.function.FunctionCtx):
                return True
        frame = frame.f_back
    return False
