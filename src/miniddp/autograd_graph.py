"""What data parallelism asks of autograd: four questions, each answered in one place.

1. *When does a gradient arrive?* A hook on the parameter's gradient accumulator, the leaf node of
   the graph, runs once the gradient is in `.grad`, and also if it turns out to be undefined.
2. *When is a backward pass over?* `at_end_of_backward` calls back once all gradients are there.
3. *Which parameters can a backward reach?* `reachable_from` visits each node of the graph once,
   a few microseconds per node. `OutputGate` keeps the answer true for outputs the loss ignores.
4. *Which tensors did a forward return?* `find_tensors` and `replace_tensors` look into containers.

`not_compiled` keeps torch.compile out of code whose side effects a traced graph would not repeat.
Source: reducer.cpp in torch/csrc/distributed/c10d; _DDPSink in torch/nn/parallel/distributed.py.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def hook_accumulators(
    owner: Any, parameters: Sequence[Tensor]
) -> tuple[list[Node], weakref.finalize]:
    """Call `owner.autograd_hook(index)` whenever the gradient of `parameters[index]` arrives.

    Returns the accumulators, which the owner must keep (autograd drops a node that nothing refers
    to, and its hooks with it), and a function that removes the hooks, which also runs when the
    owner is deleted. An earlier owner on the same parameters gets a call of its `reset_state`.
    """
    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    this = weakref.ref(owner)

    def hook_for(index: int) -> Callable[..., None]:
        def hook(gradients: Any, nothing: Any) -> None:
            if (owner := this()) is not None:
                owner.autograd_hook(index)

        return hook

    handles = []
    for index, node in enumerate(nodes):
        metadata: Any = node.metadata
        previous = metadata.get("miniddp.owner", lambda: None)()
        if previous is not None and previous is not owner:
            previous.reset_state()
        metadata["miniddp.owner"] = this
        handles.append(node.register_hook(hook_for(index)))

    def remove_all() -> None:
        for handle in handles:
            handle.remove()

    remove = weakref.finalize(owner, remove_all)
    remove.atexit = False
    return nodes, remove


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the running backward pass has produced all its gradients.

    It runs on the CUDA streams of the caller of `backward()`, which by then wait for all gradients,
    but in the thread that finished the last node: for a graph on a GPU, autograd's own.
    """
    # A private interface of autograd; there is no public one. This is its only use.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def reachable_from(tensors: Iterable[Tensor]) -> set[Node]:
    """Every node of the graph that a backward pass from `tensors` can visit."""
    roots = {get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad}
    seen, to_visit = set(roots), list(roots)
    while to_visit:
        for node, _ in to_visit.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                to_visit.append(node)
    return seen


class OutputGate(torch.autograd.Function):
    """The identity on all outputs together: backward visits all of them or none.

    Without it, a backward whose loss ignores an output would not visit the parameters behind it,
    and their buckets would never be full. With it their hooks run, with an undefined gradient.
    """

    @staticmethod
    def forward(ctx: Any, clone: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Without a copy, autograd takes the outputs for views and refuses in-place changes.
        return tuple(tensor.clone() for tensor in tensors) if clone else tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)

    @classmethod
    def pass_through(cls, output: Any, clone: bool = True) -> Any:
        """`output`, every tensor of it that has a graph led through one gate."""
        tensors = find_tensors(output)
        gated = iter(cls.apply(clone, *(t for t in tensors if t.grad_fn is not None)) or ())
        return replace_tensors(
            output, iter([next(gated) if t.grad_fn is not None else t for t in tensors])
        )


def find_tensors(output: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts, and dataclasses, in a fixed order."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for part in _parts(output).values() for tensor in find_tensors(part)]


def replace_tensors(output: Any, replacements: Iterator[Tensor]) -> Any:
    """A copy of `output` in which each tensor of `find_tensors(output)` is the next replacement."""
    if isinstance(output, Tensor):
        return next(replacements)
    parts = {key: replace_tensors(part, replacements) for key, part in _parts(output).items()}
    if not parts:
        return output
    if isinstance(output, tuple):
        values = parts.values()
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    replaced = copy.copy(output)
    for key, part in parts.items():
        if isinstance(output, dict | list):
            replaced[key] = part
        else:
            object.__setattr__(replaced, key, part)
    return replaced


def _parts(output: Any) -> dict[Any, Any]:
    if isinstance(output, dict):  # first: a model output may be a dict and a dataclass
        return dict(output)
    if isinstance(output, list | tuple):
        return dict(enumerate(output))
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {}


def not_compiled(function: Callable, recursive: bool = True) -> Callable:
    """`function` runs as written in a compiled model; so does what it calls, if `recursive`."""
    # Private, as in torch's optimizers: the public torch.compiler.disable loads Dynamo at once,
    # which would add a second to each `import miniddp`.
    return torch._disable_dynamo(function, recursive=recursive)
