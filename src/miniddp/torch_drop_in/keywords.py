"""The rare keywords of torch's DistributedDataParallel: what they mean, as functions."""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.utils.rnn import PackedSequence

from miniddp import errors


def devices_of(
    parameters: Mapping[str, Tensor],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[str, list[int] | None, int | None]:
    """The type of the parameters' devices, and the two keywords as indices; None where not used.

    Raises:
        ValueError: several types of devices, or keywords that fit one GPU for another module.
    """
    devices = {parameter.device for parameter in parameters.values()}
    types = {device.type for device in devices}
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if len(types) != 1:
        raise ValueError(
            "MiniDDP's input module must be on the same type of devices, but its parameters are "
            f"located in {sorted(types)}; move the module to one of them first"
        )
    device_type = types.pop()
    if not device_ids or device_type == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}; "
                "leave both out"
            )
        return device_type, None, None
    index = _index_of(device_ids[0])
    return device_type, [index], index if output_device is None else _index_of(output_device)


def moved_to(value: Any, device: torch.device) -> Any:
    """`value`, tuples, lists and dicts in it copied, with every tensor in them on `device`.

    A PackedSequence is moved whole, since a part of it belongs on the CPU.
    """
    if isinstance(value, Tensor | PackedSequence):
        return value.to(device)
    if isinstance(value, list | tuple):
        parts = [moved_to(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        moved = copy.copy(value)
        moved.update({key: moved_to(part, device) for key, part in value.items()})
        return moved
    return value


def _index_of(device: int | str | torch.device) -> int:
    """The number of a GPU. Not yet run with one; `make gpu` does that."""
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return torch.cuda.current_device() if device.index is None else device.index


def synced_buffers_at(
    broadcast_buffers: bool | None, forward_sync: bool | None
) -> tuple[bool, bool]:
    """Whether buffers are synchronized (in forwards, at construction), from the two keywords."""
    if forward_sync is not None:
        if broadcast_buffers is not None:
            warnings.warn(
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. "
                "`broadcast_buffers` is deprecated and its value is ignored when "
                "`forward_sync_buffers` is provided.",
                FutureWarning,
                stacklevel=errors.stacklevel_of_caller(),
            )
        return forward_sync, True
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: "
            "unlike `broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at "
            "init.",
            FutureWarning,
            stacklevel=errors.stacklevel_of_caller(),
        )
        return broadcast_buffers, broadcast_buffers
    return True, True


def check_comm_hook(hook: Any, error: Callable[[str, type[Exception]], Exception]) -> None:
    """Raise the `error` of a TypeError or ValueError if `hook` cannot be a comm hook."""
    if not callable(hook):
        raise error("Communication hook must be callable.", TypeError)
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        text = f"its second argument must be named bucket, found {signature}."
        raise error(f"Communication hook: {text}", ValueError)
    bucket = signature.parameters["bucket"].annotation
    named = isinstance(bucket, type) and bucket.__name__ == "GradBucket"
    if bucket not in (inspect.Parameter.empty, dist.GradBucket) and not named:
        text = "bucket annotation should be dist.GradBucket."
        raise error(f"Communication hook: {text}", ValueError)
    if signature.return_annotation not in (inspect.Signature.empty, Future[Tensor]):
        text = "return annotation should be torch.futures.Future[torch.Tensor]."
        raise error(f"Communication hook: {text}", ValueError)


def group_of(
    module: nn.Module, process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup | None:
    """The group that `process_group` or `device_mesh` names; None for the default group.

    Raises RuntimeError for both at once and for a mesh of several dimensions, NotImplementedError
    for a mesh together with DTensor parameters.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        raise NotImplementedError(
            "MiniDDP does not support a device_mesh together with DTensor parameters"
        )
    return device_mesh.get_group(mesh_dim=0)
