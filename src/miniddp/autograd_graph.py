"""What data parallelism has to ask of autograd: four questions, each in one place.

1. *Which tensors did a forward return?* `find_tensors` looks into nested tuples, lists, dicts and
   dataclasses; `replace_tensors` puts others in their places.
2. *Where does a parameter's gradient arrive?* At its gradient accumulator, the leaf node of the
   graph: `gradient_accumulator`. A hook on that node fires once the gradient is in `.grad`, and it
   fires too when the gradient turns out to be undefined, which hooks on the tensor do not.
3. *Which parameters can still get a gradient?* `reachable_from` walks the graph. Cost: one step for
   each node, a few microseconds, in every iteration in which it is asked.
4. *When is a backward pass over?* `at_end_of_backward` calls back once all gradients are there.

`OutputGate` makes the second question answerable for outputs that the loss does not use.
Source: prepare_for_backward and search_unused_parameters in
torch/csrc/distributed/c10d/reducer.cpp, _DDPSink in torch/nn/parallel/distributed.py.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def find_tensors(output: Any) -> list[Tensor]:
    """All tensors in `output`, in a fixed order, however tuples, lists, dicts and dataclasses nest.

    Also looks into a dataclass that is a dict as well (the model outputs of some libraries), once.
    """
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
    if isinstance(output, dict):
        return dict(output)
    if isinstance(output, list | tuple):
        return dict(enumerate(output))
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {}


def gradient_accumulator(parameter: Tensor) -> Node:
    """The graph's node that adds the gradient to `parameter.grad`; hold it, or it is made anew."""
    return get_gradient_edge(parameter).node


def reachable_from(tensors: Iterable[Tensor]) -> set[Node]:
    """Every node of the graph that a backward pass from `tensors` can come by."""
    roots = {get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad}
    seen, to_visit = set(roots), list(roots)
    while to_visit:
        for node, _ in to_visit.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                to_visit.append(node)
    return seen


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the backward pass that is running has produced all its gradients.

    It runs on the CUDA streams of the caller of `backward()`, after autograd has made these wait
    for the streams on which gradients were accumulated. Its thread is the one that finished the
    last node: the caller's for a graph on the CPU, autograd's own thread of a GPU for one on it.
    """
    # A private interface of autograd; there is no public one. This is its only use.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def at_start_of_backward(output: Any, callback: Callable[[], None]) -> None:
    """Call `callback` whenever a backward pass enters the graph of a tensor in `output`."""

    def entered(gradient: Tensor) -> None:
        callback()

    for tensor in find_tensors(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(entered)


class OutputGate(torch.autograd.Function):
    """The identity on all outputs together, so that backward passes all of them or none.

    If the loss uses only some outputs, backward would never come to the parameters behind the
    others, and whoever waits for their gradients would wait for ever. Through the gate, backward
    visits them with an undefined gradient: their accumulators' hooks fire and `.grad` stays as it
    was.
    """

    @staticmethod
    def forward(ctx: Any, clone: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Without a copy the outputs are views of one another's graph and refuse in-place changes.
        return tuple(tensor.clone() for tensor in tensors) if clone else tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)

    @classmethod
    def pass_through(cls, output: Any, clone: bool = True) -> Any:
        """`output` with every tensor that has a graph led through one gate; all else untouched."""
        tensors = find_tensors(output)
        gated = iter(cls.apply(clone, *(t for t in tensors if t.grad_fn is not None)) or ())
        return replace_tensors(
            output, iter([next(gated) if t.grad_fn is not None else t for t in tensors])
        )
