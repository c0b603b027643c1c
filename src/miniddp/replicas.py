"""Making the replicas equal: verify that all ranks hold the same model, then broadcast one rank's.

Data parallelism averages gradients; that the averages mean the same on every rank rests on equal
parameters at the start. Copying tensors between models that differ would end in a crash on one
rank, a hang on another, or garbage without a word, so the models' descriptions are compared first.

Cost: one all-gather of 32 bytes a rank if all agree (the descriptions themselves, if not), and one
broadcast of all parameters and buffers, in chunks of 250 MiB.
Source: _verify_param_shape_across_processes and _sync_module_states in torch/distributed/utils.py.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp.buckets import MIB, Plan, initial_plan, sizes_of

_CHUNK = (250 * MIB,)
_NO_TIMEOUT = timedelta(0)
_MOST_LINES = 20  # of an error's text


def wait_for(work: dist.Work) -> None:
    """Wait for an asynchronous collective, also of a process group that is written in Python.

    The `wait` of such a group's works takes a timeout and has no default, unlike the built-in ones.
    """
    work.wait(_NO_TIMEOUT)


def size_of_group(group: dist.ProcessGroup | None) -> int:
    """W, the number of ranks in `group` (the default one when None).

    Raises ValueError on a rank outside of it, where torch gives -1 for the size, and a collective
    only warns.
    """
    size = dist.get_world_size(group)
    if size < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: call on its members only")
    return size


def verify_same_model(
    named: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    settings: Mapping[str, Any] | None = None,
    problem: Exception | None = None,
) -> None:
    """Compare models over the ranks before data moves; every rank raises what any one found.

    Args:
        named: the tensors, of which names, shapes, strides, dtypes and requires_grad are compared.
        group: the ranks.
        settings: what else has to be the same on every rank, by name.
        problem: what keeps this rank from taking part. It is raised here, and told to the others.

    Raises:
        RuntimeError: on every rank, if any two differ, or one has a problem; it names the ranks.
    """
    ours = (
        {name: _describe(tensor) for name, tensor in named.items()},
        {name: repr(value) for name, value in (settings or {}).items()},
        "" if problem is None else f"{type(problem).__name__}: {problem}",
    )
    digest = hashlib.sha256(repr([list(ours[0].items()), *ours[1:]]).encode()).digest()
    message = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(_device_of(named, group))
    gathered = [torch.empty_like(message) for _ in range(group.size())]
    wait_for(dist.all_gather(gathered, message, group=group, async_op=True))
    every = [ours] * group.size()
    if not all(torch.equal(theirs, message) for theirs in gathered):
        dist.all_gather_object(every, ours, group=group)
    elif problem is None:
        return
    tensors, of_settings, problems = zip(*every, strict=True)
    if problem is not None:
        raise problem
    if any(problems):
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
        raise RuntimeError(
            f"Rank {group.rank()} could take part, but others could not, so every rank raises. "
            f"{told}"
        )
    if tensors.count(tensors[0]) == len(tensors) and _in_one_order(tensors):
        raise RuntimeError(
            "MiniDDP expects the same settings on all ranks, since they decide which collectives a "
            f"rank takes part in:\n{''.join(_differing(of_settings))}(Reported on rank "
            f"{group.rank()}; every rank raises this.) Pass the same values on every rank."
        )
    raise RuntimeError(_difference(tensors, group.rank()))


def _device_of(named: Mapping[str, Tensor], group: dist.ProcessGroup) -> torch.device:
    """A device that `group` can send from."""
    if named:
        return next(iter(named.values())).device
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup, src: int) -> None:
    """Overwrite `tensors` by those of rank `src` of `group`; of the same shapes on every rank.

    Autograd's version counters stay as they are: a graph built before may still be used.

    Raises:
        ValueError: elements of a tensor share memory (it was expanded), so it cannot be written.
    """
    for tensor in tensors:
        # Checked on the source too, which writes nothing: it would wait alone for the others.
        if any(
            n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise ValueError(
                f"a parameter or buffer of shape {tuple(tensor.shape)} is expanded: several of its "
                "elements are one in memory, so it cannot be overwritten. Register its clone()"
            )
    for indices in reversed(initial_plan(sizes_of(tensors), _CHUNK)):
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
    """The plan that rank 0 of `group` gives, on every rank; all for the same parameters."""
    indices = [index for bucket in plan for index in bucket]
    sizes = [len(bucket) for bucket in plan] + [0] * (len(indices) - len(plan))
    message = torch.tensor([indices, sizes], device=device)
    wait_for(dist.broadcast(message, group=group, group_src=0, async_op=True))
    indices, sizes = message.tolist()
    ends = list(accumulate(sizes))
    return [indices[end - size : end] for end, size in zip(ends, sizes, strict=True) if size]


def _describe(tensor: Tensor) -> str:
    trainable = "trainable" if tensor.requires_grad else "not trainable"
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}, {trainable}"


def _difference(every: Sequence[Mapping[str, str]], rank: int) -> str:
    counts = ", ".join(
        f"rank {r} has {len(described)} of them" for r, described in enumerate(every)
    )
    lines = _differing(every) or ["  the order in which they are defined\n"]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more\n"]
    return (
        "MiniDDP expects same model across all ranks, but the parameters (and synchronized "
        f"buffers) differ: {counts}. What appears not to match:\n{''.join(lines)}(Reported on rank "
        f"{rank}; every rank raises this.) Build the module by the same code and configuration on "
        "every rank, then wrap it."
    )


def _differing(every: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each name whose value is not the same on every rank."""
    lines = []
    for name in dict.fromkeys(name for described in every for name in described):
        ranks_of = defaultdict(list)
        for rank, described in enumerate(every):
            ranks_of[described.get(name, "absent")].append(rank)
        if len(ranks_of) > 1:
            found = "; ".join(f"{what} on {_ranks(ranks)}" for what, ranks in ranks_of.items())
            lines.append(f"  {name}: {found}\n")
    return lines


def _in_one_order(every: Sequence[Mapping[str, str]]) -> bool:
    return all(list(described) == list(every[0]) for described in every)


def _ranks(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(map(str, ranks))
