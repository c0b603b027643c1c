"""What data parallelism needs from autograd: when a gradient arrives, and when a backward is over.

A gradient accumulator is the leaf node of the graph that adds to one parameter's `.grad`. A hook on
it runs after the parameter's own hooks, also for an undefined gradient. Source: torch's
reducer.cpp.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


class GradientOwner(Protocol):
    """What collects the gradients of some parameters."""

    def autograd_hook(self, index: int) -> None:
        """The gradient of parameter `index` has arrived."""

    def reset_state(self) -> None:
        """Another owner has hooked one of the parameters."""


def hook_accumulators(
    owner: GradientOwner, parameters: Sequence[Tensor]
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
