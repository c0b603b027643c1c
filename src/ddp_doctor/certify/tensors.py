"""Samples that come from no data loader: random draws, slices of a tensor, converted arrays.

One process of a script makes its own samples only. So the tensors that the script's own lines make
and use are written down in the first step, by place and turn; then each place gets what the plan
says. Sizes, counts, and masks that are computed from these tensors follow by themselves. Weights,
gradients, activations, and all that is computed from them are left alone.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddp_doctor.certify.samples import alike
from ddp_doctor.certify.steps import Steps
from ddp_doctor.places import is_users, users_frame

MADE = {  # functions that make samples
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like", "uniform_", "normal_", "random_", "bernoulli_"),
    *("tensor", "as_tensor", "from_numpy", "stack", "cat", "index_select", "__getitem__"),
}
LEFT_ALONE = {"backward", "size", "dim", "__len__", "__setitem__", "detach_", "requires_grad_"}
BYTES = 1 << 28  # what is written down in all


class Tensors(TorchFunctionMode):
    """Sees every function of torch that the script calls."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.turns: dict[Any, int] = {}
        self.first_turns: dict[Any, int] = {}
        # By their ids: tensors that are one sample each; weights, gradients, activations.
        self.single: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.trained: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.bytes = 0
        self.hidden = False
        self.thread = threading.get_ident()
        steps.ends.append(self._end_of_step)
        nn.modules.module.register_module_forward_pre_hook(self._before_module)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Neither write down nor replace what happens inside."""
        before, self.hidden = self.hidden, True
        try:
            yield
        finally:
            self.hidden = before

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.hidden or threading.get_ident() != self.thread:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        frame = sys._getframe(1)
        where = None if name in LEFT_ALONE or name == "__get__" else users_frame(frame)
        if where is None:
            return self._followed(name, args, function(*args, **kwargs))
        site = (where.f_code.co_filename, where.f_lineno, where.f_lasti, name)
        changes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        if is_users(frame.f_code.co_filename) and not changes and "out" not in kwargs:
            args = self._given(site, args)
        result = self._followed(name, args, function(*args, **kwargs))
        if name in MADE and isinstance(result, Tensor) and self._is_data(result):
            return self._planned(site, result, self.steps.handed is not None)
        return result

    def _before_module(self, module: nn.Module, args: Any) -> Any:
        if self.hidden or threading.get_ident() != self.thread:
            return None
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") == "torch.nn.modules.module":
            frame = frame.f_back
        with self.unseen():
            for buffer in module.buffers():
                self.trained[id(buffer)] = buffer
            if not is_users(frame.f_code.co_filename):
                return None
            site = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti, "forward")
            return self._given(site, args)

    def _is_data(self, tensor: Tensor) -> bool:
        return not (
            type(tensor) is not Tensor  # a parameter, a sharded tensor
            or tensor.requires_grad
            or tensor.dim() == 0
            or self.single.get(id(tensor)) is tensor
            or self.trained.get(id(tensor)) is tensor
        )

    def _followed(self, name: str, args: Any, result: Any) -> Any:
        """Remember what kind of tensor a result is."""
        if not isinstance(result, Tensor) or result.requires_grad:
            return result
        inputs = [one for one in _flat(args) if isinstance(one, Tensor)]
        if any(one.requires_grad or self.trained.get(id(one)) is one for one in inputs):
            if result.dim():  # a number that is computed from a loss is no weight
                self.trained[id(result)] = result
        elif (name == "__getitem__" and result.dim() < 2 and _one_index(args[1])) or (
            name not in ("stack", "cat") and any(self.single.get(id(x)) is x for x in inputs)
        ):
            self.single[id(result)] = result
        return result

    def _given(self, site: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a call, each as the plan says."""
        return tuple(
            self._planned((*site, n), one, replaced=False)
            if isinstance(one, Tensor) and self._is_data(one)
            else one
            for n, one in enumerate(args)
        )

    def _planned(self, place: Any, value: Tensor, replaced: bool) -> Tensor:
        """`value`, written down, or what the plan says instead.

        `replaced`: also if all ranks had the same, as for samples that are drawn.
        """
        turn = self.turns.get(place, 0)
        self.turns[place] = turn + 1
        handed, key = self.steps.handed, (place, turn)
        if handed is None:
            self.bytes += value.nbytes
            if self.bytes < BYTES:
                self.steps.recorded.samples[key] = value.detach().clone()
            return value
        every = handed.everyones(key)
        if every is None:
            return value
        if not replaced and handed.same_everywhere(key):
            return value
        wanted = handed.rows(self.steps.now, key)
        if wanted is None:
            self.steps.unjoined.append(f"{place[0]}:{place[1]}")
            return value
        if wanted.shape == value.shape and alike([wanted, value]):
            return value
        return wanted.clone()

    def _end_of_step(self) -> None:
        if self.steps.count == 1:
            self.first_turns = dict(self.turns)
        elif any(self.first_turns.get(place) != turns for place, turns in self.turns.items()):
            self.steps.unlike.append(self.steps.count - 1)
        self.turns.clear()


def _flat(args: Any) -> Iterator[Any]:
    for one in args:
        if isinstance(one, list | tuple):
            yield from one
        else:
            yield one


def _one_index(index: Any) -> bool:
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, int) or (isinstance(first, Tensor) and first.dim() == 0)
