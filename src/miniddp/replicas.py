"""Equal replicas: verify that all ranks hold the same model, then broadcast one rank's values.

Averaged gradients keep replicas equal only if they start equal. A broadcast between models that
differ would crash, hang, or write garbage, so their descriptions are compared first.

Cost: one all-gather of 32 bytes per rank, and one broadcast per 250 MiB of each dtype.
Source: _verify_param_shape_across_processes and _sync_module_states in torch/distributed/utils.py.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from miniddp import errors
from miniddp.buckets import MIB, Plan, initial_plan, sizes_of


def wait_for(work: dist.Work) -> None:
    """Wait for a collective. A group written in Python requires a timeout: 0 means no limit."""
    work.wait(timedelta(0))


def wait_for_future(future: Future, buffer: Tensor) -> Any:
    """Wait for the future of a collective or comm hook on `buffer`; return its value."""
    value = future.wait()
    if buffer.is_cuda:
        wait_for_default_stream(buffer.device)
    return value


def wait_for_default_stream(device: torch.device) -> None:
    """Let the current CUDA stream wait for the default one, unless a CUDA graph is captured.

    NCCL's futures make the current stream wait; gloo's make only the default stream wait.
    """
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if current != default and not torch.cuda.is_current_stream_capturing():
        current.wait_stream(default)


def this_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default one. Raises ValueError on a rank outside the group."""
    if dist.get_world_size(group) < 0:  # collectives would only warn
        raise ValueError(f"rank {dist.get_rank()} is not in the group: call on its members only")
    return cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)


def verify_same_model(
    named: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    settings: Mapping[str, Any] | None = None,
    problem: Exception | None = None,
) -> None:
    """Compare the ranks' models before data moves; every rank raises RuntimeError if they differ.

    `named`: tensors whose names, order, shapes, strides, dtypes, requires_grad, and sharing of
    devices must agree, as must `settings`. A rank raises its own `problem`; the others name it.
    """
    model, values = {}, {name: repr(value) for name, value in (settings or {}).items()}
    seen: dict[torch.device, str] = {}  # numbered, as cuda:0 here may be cuda:1 on another rank
    try:
        for name, tensor in named.items():
            where = seen.setdefault(tensor.device, f", on its device {len(seen)}" * bool(seen))
            trainable = "trainable" if tensor.requires_grad else "not trainable"
            sizes = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            model[name] = f"{sizes}, {tensor.dtype}, {trainable}{where}"
    except Exception as error:  # a lazy parameter has no shape before its first forward
        problem = problem or error
    fault = "" if problem is None else f"{type(problem).__name__}: {problem}"
    ours = (list(model.items()), values, fault)
    kinds = {device.type for device in group._device_types}  # private; get_backend_config can fail
    usable = (d for d in seen if problem is None or not kinds or d.type in kinds)
    device = next(usable, None) or ("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    message = torch.tensor([*sha256(repr(ours).encode()).digest()], device=device).byte()
    gathered = [torch.empty_like(message) for _ in range(group.size())]
    wait_for(dist.all_gather(gathered, message, group=group, async_op=True))
    every = [ours] * group.size()
    if not all(torch.equal(theirs, message) for theirs in gathered):
        dist.all_gather_object(every, ours, group=group)
    elif problem is None:
        return
    models, of_settings, faults = zip(*every, strict=True)
    if problem is not None:
        raise problem
    if any(faults):
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(faults) if text)
        raise RuntimeError(f"Some ranks cannot take part, so every rank raises. {told}")
    what, found = "settings", list(of_settings)
    advice = "Pass the same values on every rank: they decide which collectives it calls."
    if all(settings_there == of_settings[0] for settings_there in of_settings):
        what, found = "model", [dict(items) for items in models]
        advice = "Build the module from the same code and configuration everywhere, then wrap it."
    raise RuntimeError(errors.different(what, group.rank(), found, advice))


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
    for indices in reversed(initial_plan(sizes_of(tensors), (250 * MIB,))):
        chunk = [tensors[index].data for index in indices]
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        if flat.numel() == 0:
            continue
        wait_for(dist.broadcast(flat, group=group, group_src=src, async_op=True))
        if group.rank() != src:
            parts = flat.split([tensor.numel() for tensor in chunk])
            for tensor, part in zip(chunk, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def plan_of_rank_0(plan: Plan, group: dist.ProcessGroup, device: torch.device) -> Plan:
    """Broadcast rank 0's plan; each rank's own `plan` must hold the same parameters."""
    numbered = [(number, index) for number, bucket in enumerate(plan) for index in bucket]
    message = torch.tensor(numbered, device=device)
    wait_for(dist.broadcast(message, group=group, group_src=0, async_op=True))
    buckets = groupby(message.tolist(), key=itemgetter(0))
    return [[index for _, index in of_bucket] for _, of_bucket in buckets]
