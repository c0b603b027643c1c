"""What the reducer says when a gradient is missing, comes twice, or comes unexpectedly.

Every text names the parameters, the rank and the next action, and keeps the phrases of torch's own
reducer, since users search for them and tools look for them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniddp.reducer import Reducer

_STATIC = "this is not compatible with static_graph set to True."


def unfinished(reducer: "Reducer") -> str:
    """The backward before this forward left buckets waiting for gradients."""
    absent = reducer.absent()
    text = "Expected to have finished reduction in the prior iteration before starting a new one. "
    if reducer.static_graph:
        text += (
            "This error indicates that your training graph has changed in this iteration, e.g., "
            "one parameter is used in first iteration, but then got unused in the second "
            f"iteration. {_STATIC}"
        )
    else:
        text += (
            "This error indicates that your module has parameters that were not used in producing "
            "loss. "
        )
        if reducer.find_unused_parameters:
            text += (
                "Since `find_unused_parameters=True` is enabled, this likely means that not all "
                "`forward` outputs participate in computing loss. You can fix this by "
            )
        else:
            text += (
                "You can enable unused parameter detection by passing the keyword argument "
                "`find_unused_parameters=True` to the wrapper, and by "
            )
        text += (
            "making sure all `forward` function outputs participate in calculating loss. Outputs "
            "are found in tensors, tuples, lists, dicts and dataclasses; in no other object."
        )
    rank = reducer.process_group.rank()
    return (
        f"{text}\nParameter indices which did not receive grad for rank {rank}: "
        f"{' '.join(map(str, absent))}"
        f"\nParameters which did not receive grad for rank {rank}: {_names(reducer, absent)}"
        "\nFor the other ranks' parameters in the step in which it happens pass strict=True; for "
        "more on the collectives set the environment variable TORCH_DISTRIBUTED_DEBUG to either "
        "INFO or DETAIL."
    )


def absent_on_ranks(reducer: "Reducer", absent: list[list[int]]) -> str:
    """With strict=True, at the end of the faulty backward: `absent[rank]` lists the indices."""
    lines = [
        f"Parameters which did not receive grad for rank {rank}: {_names(reducer, indices)}"
        for rank, indices in enumerate(absent)
        if indices
    ]
    if reducer.static_graph:
        remedy = (
            "With static_graph=True every iteration has to use the parameters of the first: if the "
            "graph changes, leave static_graph out. If it should not change, look"
        )
    elif reducer.find_unused_parameters:
        remedy = (
            "Parameters that the outputs do not reach are found already. These were reached, and "
            "their gradients never came: the loss was computed past the outputs, or one backward "
            "covered only a part of them, to be followed by another. Let one backward cover all: "
            "sum the losses first. Else look"
        )
    else:
        remedy = (
            "If that is meant, pass the keyword argument `find_unused_parameters=True` to the "
            "wrapper. If several backwards share a forward, sum their losses and call one. If "
            "neither, look"
        )
    return (
        "This backward did not produce the gradients of all parameters, and no rank took a step.\n"
        + "\n".join(lines)
        + f"\n{remedy} for outputs of `forward` that the loss does not use, and for branches of "
        "the model that were not taken."
    )


def marked_twice(reducer: "Reducer", index: int) -> str:
    """A second gradient of the same parameter in one backward, after its bucket took the first."""
    text = (
        "Expected to mark a variable ready only once. This error is caused by one of the following "
        "reasons: 1) Use of a module parameter outside the `forward` function. Please make sure "
        "model parameters are not shared across multiple concurrent forward-backward passes. "
        "2) Reused parameters in multiple reentrant backward passes, as when several reentrant "
        "`checkpoint` functions wrap the same part of the model. If the graph is the same in every "
        "iteration, pass static_graph=True or call _set_static_graph(); otherwise use "
        "checkpoint(..., use_reentrant=False). "
    )
    if reducer.unused:
        text += (
            "3) Incorrect unused parameter detection: the parameter was not part of the graph of "
            "`forward`'s return value, and got a gradient all the same. If all parameters take "
            "part in the backward pass, you can disable unused parameter detection by passing the "
            "keyword argument `find_unused_parameters=False`. "
        )
    return (
        f"{text}\nParameter at index {index} with name {reducer.names[index]} has been marked as "
        f"ready twice on rank {reducer.process_group.rank()}. This means that multiple autograd "
        "engine hooks have fired for this particular parameter during this iteration."
    )


def graph_changed(reducer: "Reducer", index: int) -> str:
    """A gradient that a static graph did not have in its first iteration."""
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        f"iteration, but then got used in the second iteration. {_STATIC}\nThe parameter is "
        f"{reducer.names[index]} (index {index}), on rank {reducer.process_group.rank()}."
    )


def not_sparse(reducer: "Reducer", index: int) -> str:
    """A dense gradient where the module announces sparse ones."""
    return (
        f"Expected variable to have sparse gradient, but that of {reducer.names[index]} is dense. "
        "Set sparse=False on its embedding, or look for a second use of its weight."
    )


def not_dense(reducer: "Reducer", indices: list[int]) -> str:
    """A sparse gradient that nobody announced: its parameter lies in a bucket of dense ones."""
    return (
        f"Expected variable to have dense gradient, but that of {_names(reducer, indices)} is "
        f"sparse on rank {reducer.process_group.rank()}. Sparse gradients are expected of "
        "nn.Embedding and nn.EmbeddingBag with sparse=True, and reduced apart. Use one of them, "
        "or let the layer give a dense gradient (sparse=False)."
    )


def not_a_future(returned: object) -> str:
    """A comm hook that returned something else than a Future."""
    return (
        f"callback must return a torch.futures.Future object, but got {type(returned)}; wrap a "
        "finished result by Future.set_result"
    )


def not_a_view(reducer: "Reducer", index: int) -> str:
    """With gradient_as_bucket_view, `.grad` was replaced while the reduction was going on."""
    return (
        "Detected at least one parameter gradient is not the expected DDP bucket view with "
        f"gradient_as_bucket_view=True: {reducer.names[index]}. Something set its .grad during "
        "backward, for example a hook or a second wrapper around the same module."
    )


def strayed(ranks: list[int]) -> str:
    """Gradients arrived that nobody had asked to reduce."""
    return (
        f"On rank {', '.join(map(str, ranks))} a backward ran whose gradients were not reduced: "
        "they are local to the rank. Its forward went past the wrapper (through `.module`), or the "
        "wrapper's forward was called again, or its gradients were reduced, before that backward "
        "came. Call the wrapper itself, once before each backward, or mark the accumulation by "
        "`no_sync()`."
    )


def _names(reducer: "Reducer", indices: list[int]) -> str:
    return ", ".join(reducer.names[index] for index in indices)
