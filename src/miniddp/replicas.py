"""Equal replicas: verify that all ranks hold the same model, then broadcast one rank's values.

Averaged gradients keep replicas equal only if they start equal. A broadcast between models that
differ would crash, hang, or write garbage, so their descriptions are compared first.

Cost: one all-gather of 32 bytes per rank, and one broadcast per 250 MiB of each dtype.
Source: _verify_param_shape_across_processes and _sync_module_states in torch/distributed/utils.py.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp import errors
from miniddp.buckets import arrival_plan, sizes_of
from miniddp.comm import wait_for

BROADCAST_BYTES = 250 * 2**20


def verify_same_model(
    named: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    settings: Mapping[str, Any] | None = None,
    problem: Exception | None = None,
) -> None:
    """Compare the ranks' models before data moves; every rank raises RuntimeError if they differ.

    `named`: tensors whose names, order, shapes, strides, dtypes, requires_grad, and sharing of
    devices must agree, as must `settings`. `problem` is this rank's own
    failure: this rank raises it, and the others raise RuntimeError and quote it.
    """
    devices = list(dict.fromkeys(tensor.device for tensor in named.values()))
    model: dict[str, str] = {}
    try:
        model = {name: _form_of(tensor, devices) for name, tensor in named.items()}
    except Exception as error:  # a lazy parameter has no shape before its first forward
        problem = problem or error
    values = {name: repr(value) for name, value in (settings or {}).items()}
    fault = "" if problem is None else f"{type(problem).__name__}: {problem}"
    ours = _Replica(list(model.items()), values, fault)

    same = _same_on_all_ranks(repr(ours), group, _device_for(group, devices, problem is not None))
    every = [ours] * group.size()
    if not same:
        dist.all_gather_object(every, ours, group=group)
    if problem is not None:
        raise problem
    if not same:
        raise RuntimeError(_difference(every, group.rank()))


class _Replica(NamedTuple):
    """What one rank says about itself."""

    model: list[tuple[str, str]]  # names and forms of the tensors, in their order
    settings: dict[str, str]
    fault: str  # why this rank cannot take part; empty if it can


def _form_of(tensor: Tensor, devices: Sequence[torch.device]) -> str:
    """All that must agree about a tensor; its device as a number, since cuda:0 may be cuda:1."""
    number = devices.index(tensor.device)
    where = f", on its device {number}" if number > 0 else ""
    trainable = "trainable" if tensor.requires_grad else "not trainable"
    sizes = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return f"{sizes}, {tensor.dtype}, {trainable}{where}"


def _device_for(
    group: dist.ProcessGroup, devices: Sequence[torch.device], failed: bool
) -> torch.device:
    """The device of the ranks' messages: the model's, since `group` may have a backend per device.

    A rank that failed may hold a model that its group cannot send, and then takes another device.
    """
    kinds = {device.type for device in group._device_types}  # private; get_backend_config can fail
    for device in devices:
        if not failed or not kinds or device.type in kinds:
            return device
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")


def _same_on_all_ranks(text: str, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks have the same text, by its hash."""
    message = torch.tensor([*sha256(text.encode()).digest()], dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(message) for _ in range(group.size())]
    wait_for(dist.all_gather(gathered, message, group=group, async_op=True))
    return all(torch.equal(theirs, message) for theirs in gathered)


def _difference(replicas: Sequence[_Replica], rank: int) -> str:
    """What differs between the ranks: a fault before all else."""
    faults = [f"rank {other}: {r.fault}" for other, r in enumerate(replicas) if r.fault]
    if faults:
        return f"Some ranks cannot take part, so every rank raises. {'; '.join(faults)}"
    settings = [replica.settings for replica in replicas]
    if any(theirs != settings[0] for theirs in settings):
        advice = "Pass the same values on every rank: they decide which collectives it calls."
        return errors.different("settings", rank, settings, advice)
    advice = "Build the module from the same code and configuration everywhere, then wrap it."
    return errors.different("model", rank, [dict(replica.model) for replica in replicas], advice)


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup, src: int) -> None:
    """Overwrite `tensors` with those of rank `src`; shapes must agree on every rank.

    No version counter changes, so older graphs stay usable. Raises ValueError if one is expanded.
    """
    for tensor in tensors:
        # Checked on the source, too: it would wait forever if only the others raised.
        if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"a parameter or buffer of shape {tuple(tensor.shape)} is expanded: its elements "
                "share memory, so it cannot be overwritten. Register its clone()"
            )
    for chunk in chunks_of([tensor.data for tensor in tensors]):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        if flat.numel() == 0:
            continue
        wait_for(dist.broadcast(flat, group=group, group_src=src, async_op=True))
        if group.rank() != src:
            parts = flat.split([tensor.numel() for tensor in chunk])
            for tensor, part in zip(chunk, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def chunks_of(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists of tensors of one dtype and device, of about `BROADCAST_BYTES` each."""
    plan = arrival_plan(sizes_of(tensors), range(len(tensors)), (BROADCAST_BYTES,))
    return [[tensors[index] for index in bucket] for bucket in plan]
