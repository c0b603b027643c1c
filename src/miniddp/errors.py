"""The core's longer messages. They keep the phrases of torch's reducer: people search for them.

Every other file may import this one; it imports none of them.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


def stacklevel_of_caller() -> int:
    """The `stacklevel` at which our caller's warnings.warn names the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level


class Advice(NamedTuple):
    """What a wrapper with more keywords adds to the reducer's messages."""

    unfinished: str = ""
    marked_twice: str = ""
    unexpected: str = ""


def outside_the_group(rank: int) -> str:
    """A rank called a function of a group that it is not in; `rank` is its number in the world."""
    return f"rank {rank} is not in the group: call on its members only"


def nothing_to_average(module: str) -> str:
    """No parameter requires a gradient."""
    return (
        "DistributedDataParallel is not needed when a module doesn't have any parameter that "
        f"requires a gradient: {module} has none. Call the module itself."
    )


def unknown_keywords(names: Sequence[str]) -> str:
    """MiniDDP has no such keywords; the class with torch's name may."""
    return (
        f"MiniDDP has no keyword {', '.join(names)}. miniddp.torch_drop_in.DistributedDataParallel "
        "takes every keyword of torch's DistributedDataParallel, static_graph among them."
    )


def cannot_be_wrapped(module: object) -> str:
    """`module` is no module, a wrapper, or sharded."""
    kind = type(module).__name__
    if not isinstance(module, torch.nn.Module):
        return f"MiniDDP wraps an nn.Module, but got {module!r}, of type {kind}."
    return (
        f"This module is a {kind}, which averages its gradients already, or those of a part of it: "
        "use it as it is, or wrap the plain module, such as a wrapper's .module."
    )


def different(what: str, rank: int, every: Sequence[Mapping[str, str]], advice: str) -> str:
    """The ranks' models or settings differ; `every`: each rank's values, by name."""
    lines = []
    for name in dict.fromkeys(name for values in every for name in values):
        ranks_of: dict[str, list[str]] = {}
        for other, values in enumerate(every):
            ranks_of.setdefault(values.get(name, "absent"), []).append(str(other))
        if len(ranks_of) > 1:
            found = "; ".join(f"{value} on rank {', '.join(r)}" for value, r in ranks_of.items())
            lines.append(f"  {name}: {found}")
    if len(lines) > 20:
        lines[20:] = [f"  and {len(lines) - 20} more"]
    listed = "\n".join(lines or ["  the order in which they are defined"])
    return (
        f"MiniDDP expects same {what} across all ranks. What appears not to match:\n{listed}\n"
        f"(Reported on rank {rank}; every rank raises this.) {advice}"
    )


def unfinished(rank: int, absent: Mapping[int, str], searched: bool, reason: str = "") -> str:
    """The previous backward lacks the gradients of `absent` (index to name); `reason`: why."""
    advice = (
        "Since `find_unused_parameters=True` is enabled, some outputs are likely unused. Fix it by"
        if searched
        else "You can enable unused parameter detection by passing the keyword argument "
        "`find_unused_parameters=True` to the wrapper, and by"
    )
    reason = reason or (
        "This error indicates that your module has parameters that were not used in producing "
        f"loss. {advice} making sure all `forward` function outputs participate in calculating "
        "loss. Outputs are found in tensors, tuples, lists, dicts and dataclasses only."
    )
    reason = reason if absent else "That backward raised an exception after its last gradient."
    lacks = f"did not receive grad for rank {rank}:"
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"{reason}\nParameter indices which {lacks} {' '.join(map(str, absent))}"
        f"\nParameters which {lacks} {', '.join(absent.values())}"
        "\nIf that backward raised an exception, construct a new wrapper on every rank."
    )


def marked_twice(rank: int, index: int, name: str, searched: bool) -> str:
    """A gradient arrived for a parameter that was counted already, or counted as unused."""
    third = ""
    if searched:
        third = " 3) Incorrect unused parameter detection; try `find_unused_parameters=False`."
    return (
        "Expected to mark a variable ready only once. This error is caused by one of the following "
        "reasons: 1) Use of a module parameter outside the `forward` function, or in concurrent "
        "forward-backward passes. 2) Reused parameters in multiple reentrant backward passes, as "
        "when several reentrant `checkpoint` functions wrap the same part of the model: use "
        "checkpoint(..., use_reentrant=False)."
        f"{third}\nParameter at index {index} with name {name} has been marked as ready "
        f"twice on rank {rank}: its autograd hook has fired twice in this iteration."
    )


def unexpected_gradients(rank: int, names: Sequence[str], layout: str = "dense") -> str:
    """The gradients of the parameters `names` do not fit into their bucket."""
    return (
        f"Expected variable to have {layout} gradient of the parameter's dtype. Not so on rank "
        f"{rank}: {', '.join(names)}. Set sparse=False if it is an nn.Embedding; if its grad_dtype "
        "was set, unset it."
    )


def unsynchronized(ranks: Sequence[int]) -> str:
    """Gradients arrived that no forward had announced."""
    return (
        f"On rank {', '.join(map(str, ranks))} a backward ran whose gradients were not reduced: "
        "they are local to the rank. Its forward bypassed the wrapper (through `.module`), or "
        "another forward, or a reduction of these gradients, ran before this backward. Call the "
        "wrapper itself, once before each backward, or mark the accumulation with `no_sync()`."
    )
