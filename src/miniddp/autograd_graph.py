"""What data parallelism needs from autograd: when a gradient arrives, and when a backward is over.

A gradient accumulator is the leaf node of the graph that adds to one parameter's `.grad`. A hook on
it runs after the parameter's own hooks, also for an undefined gradient. Source: torch's
reducer.cpp.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def hook_accumulators(
    owner: Any, parameters: Sequence[Tensor]
) -> tuple[list[Node], weakref.finalize]:
    """Call `owner.autograd_hook(index)` whenever the gradient of `parameters[index]` arrives.

    Returns the accumulators and a function that removes the hooks. The owner must keep the
    accumulators: autograd drops a node that nothing refers to, and its hooks with it. When the
    owner is deleted, the hooks are removed, too. An earlier owner's `reset_state` is called.
    """
    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    this, hooks = weakref.ref(owner), ExitStack()

    def hook(index: int, *gradients: Any) -> None:
        if (owner := this()) is not None:
            owner.autograd_hook(index)

    for index, node in enumerate(nodes):
        metadata: Any = node.metadata
        previous = metadata.get("miniddp.owner", lambda: None)()
        if previous is not None and previous is not owner:
            previous.reset_state()
        metadata["miniddp.owner"] = this
        hooks.callback(node.register_hook(partial(hook, index)).remove)
    remove = weakref.finalize(owner, hooks.close)
    remove.atexit = False
    return nodes, remove


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the running backward pass has produced all its gradients.

    It runs on the CUDA streams that were current when `backward()` was called, after they wait for
    all gradients. For a graph on a GPU, it runs in one of autograd's own threads.
    """
    # A private interface of autograd; there is no public one. This is its only use.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_is_running() -> bool:
    """Whether the caller is called by a backward pass, as hooks and checkpoints are."""
    return torch._C._current_graph_task_id() != -1  # private; there is no public one


def not_compiled(function: Callable, recursive: bool = True) -> Callable:
    """Keep torch.compile from compiling `function` and, if `recursive`, what it calls."""
    # Private, as in torch's optimizers: the public torch.compiler.disable loads Dynamo at once,
    # which would add a second to each `import miniddp`.
    return torch._disable_dynamo(function, recursive=recursive)
