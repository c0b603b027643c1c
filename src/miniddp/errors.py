"""Every message of the core, as pure functions of plain data.

A message says what was found, where, and what to do next. It keeps the phrases of torch's own
reducer, because users search for them and tools look for them.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

_MOST_LINES = 20
_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))


def stacklevel_of_caller() -> int:
    """The `stacklevel` by which warnings.warn, called by our caller, names the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level


def another_rank_failed(rank: int, problems: Sequence[str]) -> str:
    """This rank could construct the wrapper; `problems`: what kept each of the others from it."""
    told = "; ".join(f"rank {other}: {text}" for other, text in enumerate(problems) if text)
    return f"Rank {rank} could take part, but others could not, so every rank raises. {told}"


def different_settings(rank: int, every: Sequence[Mapping[str, str]]) -> str:
    """The ranks' keywords differ; `every`: each rank's settings."""
    return (
        "MiniDDP expects the same settings on all ranks, since they decide which collectives a "
        f"rank takes part in:\n{''.join(_differing(every))}(Reported on rank {rank}; every rank "
        "raises this.) Pass the same values on every rank."
    )


def different_models(rank: int, every: Sequence[Mapping[str, str]]) -> str:
    """The ranks' models differ; `every`: each rank's tensors, described, by name."""
    counts = ", ".join(
        f"rank {other} has {len(model)} of them" for other, model in enumerate(every)
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
    """One line per name whose value is not the same on every rank."""
    lines = []
    for name in dict.fromkeys(name for described in every for name in described):
        ranks_of = defaultdict(list)
        for rank, described in enumerate(every):
            ranks_of[described.get(name, "absent")].append(str(rank))
        if len(ranks_of) > 1:
            found = "; ".join(f"{what} on rank {', '.join(r)}" for what, r in ranks_of.items())
            lines.append(f"  {name}: {found}\n")
    return lines


def illegal_transition(state: str, wanted: str) -> str:
    """The reducer was asked for something that its state does not allow."""
    return (
        f"the reducer is {state} and cannot become {wanted}. A backward that was interrupted, for "
        "example by an exception, leaves it REDUCING: make a new wrapper to go on after one."
    )


def unfinished(
    rank: int, absent: Mapping[int, str], find_unused: bool, reason: str | None = None
) -> str:
    """The backward before this forward left buckets waiting; `absent`: index to name.

    `reason` replaces what is said about unused parameters.
    """
    outputs = (
        "making sure all `forward` function outputs participate in calculating loss. Outputs are "
        "found in tensors, tuples, lists, dicts and dataclasses; in no other object."
    )
    if reason is None:
        reason = (
            "This error indicates that your module has parameters that were not used in producing "
            "loss. "
        ) + (
            "Since `find_unused_parameters=True` is enabled, this likely means that not all "
            f"`forward` outputs participate in computing loss. You can fix this by {outputs}"
            if find_unused
            else "You can enable unused parameter detection by passing the keyword argument "
            f"`find_unused_parameters=True` to the wrapper, and by {outputs}"
        )
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"{reason}\nParameter indices which did not receive grad for rank {rank}: "
        f"{' '.join(map(str, absent))}"
        f"\nParameters which did not receive grad for rank {rank}: {', '.join(absent.values())}"
        "\nFor the other ranks' parameters in the step in which it happens pass strict=True to "
        "miniddp.torch_drop_in.DistributedDataParallel; for more on the collectives set the "
        "environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
    )


def marked_twice(rank: int, index: int, name: str, searched: bool) -> str:
    """A second gradient of one parameter in one backward, after its bucket took the first."""
    text = (
        "Expected to mark a variable ready only once. This error is caused by one of the following "
        "reasons: 1) Use of a module parameter outside the `forward` function. Please make sure "
        "model parameters are not shared across multiple concurrent forward-backward passes. "
        "2) Reused parameters in multiple reentrant backward passes, as when several reentrant "
        "`checkpoint` functions wrap the same part of the model. If the graph is the same in every "
        "iteration, pass static_graph=True or call _set_static_graph(); otherwise use "
        "checkpoint(..., use_reentrant=False). "
    )
    if searched:
        text += (
            "3) Incorrect unused parameter detection: the parameter was not part of the graph of "
            "`forward`'s return value, and got a gradient all the same. If all parameters take "
            "part in the backward pass, you can disable unused parameter detection by passing the "
            "keyword argument `find_unused_parameters=False`. "
        )
    return (
        f"{text}\nParameter at index {index} with name {name} has been marked as ready twice on "
        f"rank {rank}. This means that multiple autograd engine hooks have fired for this "
        "particular parameter during this iteration."
    )


def misplaced(rank: int, names: Sequence[str], expected: str) -> str:
    """A sparse gradient in a bucket of dense ones, or the reverse."""
    advice = {
        "dense": (
            "Wrap the module in miniddp.torch_drop_in.DistributedDataParallel, which expects the "
            "sparse gradients of nn.Embedding and nn.EmbeddingBag, or set sparse=False."
        ),
        "sparse": "Set sparse=False on its embedding, or look for a second use of its weight.",
    }
    found = "sparse" if expected == "dense" else "dense"
    return (
        f"Expected variable to have {expected} gradient, but that of {', '.join(names)} is {found} "
        f"on rank {rank}. {advice[expected]}"
    )


def not_a_future(kind: type) -> str:
    """A comm hook returned something other than a Future."""
    return (
        f"callback must return a torch.futures.Future object, but got {kind}; wrap a finished "
        "result with Future.set_result"
    )


def not_a_view(name: str) -> str:
    """With gradient_as_bucket_view, `.grad` was replaced during the reduction."""
    return (
        "Detected at least one parameter gradient is not the expected DDP bucket view with "
        f"gradient_as_bucket_view=True: {name}. Something set its .grad during backward, for "
        "example a hook or a second wrapper around the same module."
    )


def unsynchronized(ranks: Sequence[int]) -> str:
    """Gradients arrived that no forward had announced."""
    return (
        f"On rank {', '.join(map(str, ranks))} a backward ran whose gradients were not reduced: "
        "they are local to the rank. Its forward bypassed the wrapper (through `.module`), or the "
        "wrapper's forward ran again, or its gradients were reduced, before that backward. Call "
        "the wrapper itself, once before each backward, or mark the accumulation with `no_sync()`."
    )
