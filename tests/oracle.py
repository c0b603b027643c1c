"""Does a wrong answer do what the right one does, on numbers that no check has?

A check calls an answer; the numbers in the arguments are drawn anew, and both answers get them.
One that returns and leaves the same is no wrong answer, and the check need not tell it.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from exercise_cells import said_to
from mutations import tensors_in
from torch import Tensor, nn

from miniddp.collectives.mesh import Mesh

PLAIN = (str, int, float, torch.Size, dist.ProcessGroup, Mesh, type(None))


def equivalent(other: Any, right: Any, check: Callable[[Any], None]) -> bool:
    """Whether `other` does what `right` does, wherever `check` calls it. Of a class: unknown."""
    if isinstance(right, type):
        return False
    if not callable(right):
        return bool(other == right)
    draws = (_compared(other, right, last_is_nan) for last_is_nan in (False, True))
    return all(said_to(draw, check) == "Right." for draw in draws)


def _compared(other: Callable[..., Any], right: Callable[..., Any], last_is_nan: bool) -> Any:
    """`right`, but each call raises AssertionError if `other` does something else."""

    def call(*args: Any, **options: Any) -> Any:
        random_numbers = torch.get_rng_state()
        found, wanted = (
            _done(answer, _drawn(args, last_is_nan, torch.Generator().manual_seed(0)), options)
            for answer in (other, right)
        )
        torch.set_rng_state(random_numbers)
        assert found[0] == wanted[0]
        torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-4, atol=1e-6, equal_nan=True)
        return right(*args, **options)

    return call


def _done(answer: Callable[..., Any], args: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """The exception; what is returned; and of all tensors in `args` the value and the gradient."""
    error, returned = None, None
    try:
        returned = answer(*args, **options)
        if isinstance(returned, Tensor) and returned.requires_grad:
            returned.sum().backward()
    except RuntimeError as raised:
        error = str(raised)
    held = tensors_in(args)
    gradients = [t.grad for t in held if t.grad is not None]
    kinds = [(t.requires_grad, t.grad is None) for t in held]
    return (error, kinds), returned, [t.detach() for t in held], gradients


def _drawn(value: Any, last_is_nan: bool, random: torch.Generator) -> Any:
    """A copy with other numbers, in the same way on all ranks: what is equal there stays equal.

    Raises TypeError for what cannot be copied, such as an iterator or a model with hooks.
    """
    if isinstance(value, Tensor):
        found = value.detach().clone()
        _draw(found, last_is_nan, random)
        return found.requires_grad_(value.requires_grad)
    if isinstance(value, nn.Module) and not hasattr(value, "module"):
        module = copy.deepcopy(value)
        for tensor in module.state_dict().values():
            _draw(tensor, last_is_nan, random)
        for own, parameter in zip(module.parameters(), value.parameters(), strict=True):
            own.grad = _drawn(parameter.grad, last_is_nan, random)
        return module
    if isinstance(value, dict):
        return {key: _drawn(each, last_is_nan, random) for key, each in value.items()}
    if isinstance(value, tuple | list):
        each = [_drawn(one, last_is_nan, random) for one in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    if isinstance(value, PLAIN):
        return value
    raise TypeError(f"a {type(value).__name__} is not drawn")


@torch.no_grad()
def _draw(tensor: Tensor, last_is_nan: bool, random: torch.Generator) -> None:
    if tensor.is_floating_point() and tensor.numel():
        tensor *= 0.5 + torch.rand(tensor.shape, generator=random).to(tensor)
        if last_is_nan:
            tensor.view(-1)[-1] = torch.nan
