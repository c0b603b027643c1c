"""What the other files ask of torch.distributed: the group, waiting for work, rank 0's plan."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from miniddp import errors


def this_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default one. Raises ValueError on a rank outside the group."""
    if dist.get_world_size(group) < 0:  # collectives would only warn
        raise ValueError(errors.outside_the_group(dist.get_rank()))
    return cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)


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


def plan_of_rank_0(
    plan: Sequence[Sequence[int]], group: dist.ProcessGroup, device: torch.device
) -> list[list[int]]:
    """Broadcast rank 0's plan: the indices of the parameters in each bucket.

    Each rank's own `plan` must hold the same parameters, in buckets of any size. Costs one
    broadcast of 16 bytes per parameter.
    """
    numbered = [(number, index) for number, bucket in enumerate(plan) for index in bucket]
    message = torch.tensor(numbered, device=device)
    wait_for(dist.broadcast(message, group=group, group_src=0, async_op=True))
    buckets = groupby(message.tolist(), key=itemgetter(0))
    return [[index for _, index in of_bucket] for _, of_bucket in buckets]
