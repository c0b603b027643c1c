"""Samples that come from no loader and have no mark: random draws, slices, converted arrays.

One process of a script makes its own samples only. So the tensors that the script's own lines make
and use are written down in the first step, by place and turn; then each place gets what the plan
says. What is computed from these tensors, sizes and counts included, follows by itself. Weights,
gradients, activations, and all that is computed from them are left alone. Inside a model, and in a
script that has a data loader, only random draws are samples, and what one rank sends to all. One
process needs these rows once for each rank.
"""

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ddp_doctor.certificate.calls import noted
from ddp_doctor.certificate.marks import certified
from ddp_doctor.certificate.plan import COPIES, DEAL, LATER, OWN, TWICE
from ddp_doctor.certificate.premises import LOSSES
from ddp_doctor.certificate.samples import (
    DELIVERED,
    FORWARD,
    MARKED,
    Handed,
    Key,
    Place,
    alike,
    is_delivered,
    is_marked,
    joinable,
    line_of,
)
from ddp_doctor.certificate.steps import Steps
from ddp_doctor.facts.containers import tensors_in, transforming
from ddp_doctor.facts.places import is_users, users_frame

DRAWN = {  # functions that draw samples, also deep inside of a library
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like", "uniform_", "normal_", "random_", "bernoulli_"),
    *("exponential_", "geometric_", "cauchy_", "log_normal_"),
}
CHOSEN = {"multinomial", "bernoulli", "poisson"}  # with probabilities that a model may compute
MADE = {  # functions that make samples where the script's own lines call them
    *DRAWN,
    *("tensor", "as_tensor", "from_numpy", "stack", "cat", "index_select", "__getitem__"),
}
LEFT_ALONE = {"backward", "size", "dim", "__len__", "detach_", "requires_grad_", "__get__"}
POSITIONS = {"nonzero", "argwhere"}
TAKES = {"index_select", "narrow", "select", "masked_select", "take"}  # some of the rows
CHOOSES = TAKES | {"__getitem__"}
SUMS = {"index_add_", "scatter_add_", "scatter_reduce_", "index_reduce_"}  # over groups of samples
SCALES = {
    *("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
    *("div", "div_", "divide", "true_divide", "__truediv__", "__rtruediv__", "__itruediv__"),
}
INDEXES = {"__getitem__", "index_select", "index_add", "index_add_", "scatter_add", "scatter_add_"}
OFTEN = (
    "At {}, one process draws random numbers more often than a rank. If the script draws for one "
    "sample after another, draw for a whole batch at once."
)
NOT_OF_SAMPLES = (
    "At {}, the random numbers are not one per sample. So in one process, the samples do not meet "
    "the numbers that they met on their rank."
)
INDEXED = (
    "At {}, the indices of every rank begin at its own first row. In one process, all point to "
    "the first rank's rows."
)
REORDERED = (
    "At {}, the script takes rows of what the model has computed before. One process has computed "
    "them from other samples, or in another order."
)
PAIRS_NO_ROWS = {"matmul", "__matmul__", "__rmatmul__", "mm", "linear"}
CONVERTS = "torch.nn.modules.module"  # moves parameters; swaps only those without a weak reference
BYTES = 1 << 28  # what is written down in all


class TensorSet(WeakValueDictionary[int, Tensor]):
    """Tensors, by what they are and not by their values; those that nobody holds leave it."""

    def add(self, *tensors: Tensor) -> None:
        self.update((id(one), one) for one in tensors)

    def discard(self, tensor: Any) -> None:
        self.pop(id(tensor), None)

    def __contains__(self, tensor: object) -> bool:
        return tensor is not None and self.get(id(tensor)) is tensor


class Tensors(TorchFunctionMode):
    """Sees every function of torch that the script calls."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.turns: Counter[Place] = Counter()
        # How often samples came into a step at a place, and into the first step.
        self.entries: Counter[Place] = Counter()
        self.first_entries: dict[int, Counter[Place]] = {}  # by the optimizer that stepped then
        self.single = TensorSet()  # one sample each
        self.trained = TensorSet()  # weights, gradients, activations
        self.sums = TensorSet()  # over groups of samples, and what follows from them
        self.rows_of_sums = TensorSet()
        self.planned = TensorSet()  # samples of this step's plan, and what is computed from them
        self.loaded = TensorSet()  # the same of a loader's samples
        self.left: set[Key] = set()  # where one process computes its own values from samples
        self.bytes = 0
        self.hidden = False
        self.inside = 0  # calls of models that go on
        self.errors = steps.errors
        self.thread = threading.get_ident()
        steps.unlike = self.unlike_the_first
        steps.ends += [self.turns.clear, self.entries.clear, self.planned.clear]
        certified.append(self.marked)
        nn.Module.__call__ = self._called(nn.Module.__call__)  # type: ignore[method-assign]
        noted(DTensor, "to_local", after=self._is_shard)
        for name in ("broadcast", "scatter") if dist.is_available() else ():
            noted(dist, name, after=self._delivered)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Neither write down nor replace what happens inside."""
        before, self.hidden = self.hidden, True
        try:
            yield
        finally:
            self.hidden = before

    @property
    def _measures(self) -> bool:
        """Whether what happens now belongs to a step that is compared."""
        steps = self.steps
        other = self.hidden or threading.get_ident() != self.thread or steps.updating
        return not (other or transforming() or steps.now == LATER or steps.only_evaluates)

    def _hidden(self) -> bool:
        marked = self.steps.handed is not None and self.steps.handed.marked
        return marked or not self._measures

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with self.errors:
            return self._seen(function, args, kwargs or {})

    def _seen(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", "")
        if self._hidden():
            return self._run(function, args, kwargs)
        frame = sys._getframe(2)
        if frame.f_globals.get("__name__") == CONVERTS:
            return function(*args, **kwargs)
        where = None if name in LEFT_ALONE else users_frame(frame)
        if where is None:
            return self._followed(name, args, self._run(function, args, kwargs))
        site = self._site(where, name)
        if name in SCALES and not self.inside:  # not what a layer scales
            self._note_scale(site, name, args)
        if self.steps.part.one:
            self._note_doubts(site, name, args)
        direct = not self.inside and is_users(_caller(frame, function).f_code.co_filename)
        if direct:
            if name == "__setitem__":  # if a step does it that the first did not, they are unlike
                self.entries[site] += 1
                self.planned.discard(args[0])
            elif not _changes(name) and "out" not in kwargs:
                if self._in_time(args):
                    args = self._given(site, args)
                else:
                    self.turns[site] += 1  # it has its turn all the same
        result = self._followed(name, args, self._run(function, args, kwargs))
        if self.steps.handed and (site, self.turns[site] - 1) in self.steps.handed.mixed:
            self.planned.discard(result)  # a number of this rank went into it
        if name in (MADE if direct else DRAWN) and self._is_data(result):
            late = self.steps.part.late and direct
            return self._made_late(site, result) if late else self._planned(site, result)
        return result

    def _note_scale(self, site: Place, name: str, args: Any) -> None:
        """By what number the script divides outputs, a loss, or gradients here."""
        trains = [
            one
            for one in args
            if isinstance(one, Tensor) and (one.requires_grad or one in self.trained)
        ]
        numbers = [float(a) for a in args if isinstance(a, int | float) and a]
        if trains and numbers:
            divides = name.lstrip("_").removeprefix("i").startswith(("div", "true"))
            divisor = numbers[0] if divides else 1 / numbers[0]
            self.steps.noted.scales[line_of(site), int(site[2])] = divisor

    def _note_doubts(self, site: Place, name: str, args: Any) -> None:
        """What one process may do in another way than the ranks, though its samples are theirs."""
        source = args[0] if args else None
        if not isinstance(source, Tensor) or self.steps.handed is None:
            return
        world = len(self.steps.handed.records)
        index = next((one for one in args[1:] if isinstance(one, Tensor)), None)
        if name not in INDEXES or type(index) is not Tensor or not source.dim():
            return
        if index.is_floating_point() or index.layout != torch.strided:
            return
        rows, odd = divmod(len(source), world)
        known = self._known(index) and index.numel() and index.dtype != torch.bool
        if known and not odd and not isinstance(source, nn.Parameter) and int(index.max()) < rows:
            self.steps.noted.doubts.append(INDEXED.format(line_of(site)))
        if name == "__getitem__" and source in self.trained and not source.requires_grad:
            self.steps.noted.doubts.append(REORDERED.format(line_of(site)))

    def _made_late(self, site: Place, value: Tensor) -> Tensor:
        """Samples that are not replaced where they are made: what else uses them is not known."""
        per_rank = (
            self.steps.handed.of_each_rank((site, self._turn(site))) if self.steps.handed else None
        )
        if per_rank is None or not alike(per_rank):
            self.steps.noted.unjoined.append(line_of(site))
        return value

    def _turn(self, place: Place) -> int:
        """How often this step was here before."""
        self.turns[place] += 1
        return self.turns[place] - 1

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call it, and note losses and half precision. What it raises is the script's affair."""
        name = getattr(function, "__name__", "")
        if name in LOSSES and self._measures:
            self.steps.premises.loss(name, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            if not self.errors.hooks:
                self.errors.of_script = error
            raise
        if isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            self.steps.noted.half = True
        return result

    def _site(self, frame: Any, name: str) -> Place:
        """A place in the script. What evaluates and trains has a place for each."""
        code = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
        return (*code, self.steps.calls.evaluates, name)

    def _in_time(self, args: Any) -> bool:
        """Whether samples are replaced that a function is given."""
        return not self.steps.part.late or any(
            isinstance(one, Tensor) and one.requires_grad for one in _flat(args)
        )

    def _called(self, call: Any) -> Any:
        """The call of a module: what it is given is a sample, what it does is a model's affair."""

        @functools.wraps(call)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.inside or not self._measures:
                return call(module, *args, **kwargs)
            with self.errors.in_hook():
                args = self._before_module(module, args, kwargs, sys._getframe(1))
                self.steps.before_call(module, args, kwargs)
            model = any(True for _ in module.parameters())
            self.inside += model
            try:
                result = call(module, *args, **kwargs)
            finally:
                self.inside -= model
                self.steps.state.note_counters()
            with self.errors.in_hook(), self.unseen():
                self.steps.after_call(module, result)
            return result

        return called

    def _before_module(self, module: nn.Module, args: Any, kwargs: Any, frame: Any) -> Any:
        if self._hidden():
            return args
        with self.unseen():
            for buffer in module.buffers():
                self.trained.add(buffer)
            if not is_users(frame.f_code.co_filename):
                return args
            given = self._given(self._site(frame, FORWARD), args, kwargs.values())
            evaluates = self.steps.part.late and not torch.is_grad_enabled()
            return args if evaluates else given  # it has its turn all the same

    def _is_shard(self, shard: Tensor, *args: Any, **kwargs: Any) -> None:
        """A shard of a weight or of a gradient is no sample."""
        self.trained.add(shard)

    def _delivered(self, work: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """A collective in which one rank says what the others get: their rows, beside their own."""
        frame = sys._getframe(2)
        if not self._hidden() and not self.steps.part.late and is_users(frame.f_code.co_filename):
            with self.errors.in_hook():
                if work is not None:
                    work.wait()
                self._deliver(self._site(frame, DELIVERED), tensor)

    def _deliver(self, place: Place, tensor: Any) -> None:
        with self.unseen():
            if not self._is_data(tensor) or self.steps.is_trained(tensor):
                return
            self._forget(tensor)
            value = self._planned(place, tensor)
            if value is not tensor:
                if value.shape != tensor.shape or self.steps.now == DEAL:
                    self.steps.noted.delivered.append(line_of(place))
                tensor.data = value
                self.planned.add(tensor)

    def from_loader(self, batch: Any) -> Any:
        """Note that a batch has its samples from the plan already."""
        self.loaded.add(*tensors_in(batch, most=1000))
        return batch

    def _known(self, tensor: Tensor) -> bool:
        """Whether a tensor is a sample of the plan or computed from one: nothing is left to do."""
        return tensor in self.planned or tensor in self.loaded

    def _forget(self, tensor: Any) -> None:
        """A tensor holds other values now, which nobody knows."""
        self.planned.discard(tensor)
        self.loaded.discard(tensor)

    def _is_data(self, tensor: Any) -> bool:
        return not (
            type(tensor) is not Tensor  # a parameter, a sharded tensor
            or tensor.is_meta
            or tensor.requires_grad
            or tensor.dim() == 0
            or tensor in self.single
            or tensor in self.trained
            or self._is_sum(tensor)
        )

    def _is_sum(self, tensor: Tensor) -> bool:
        """Whether a tensor holds sums over samples, or what is computed from them: no samples.

        A slice of their rows may be: of neighbors that were summed for each node of a graph.
        """
        if tensor in self.rows_of_sums:
            return False
        return tensor in self.sums or tensor._base in self.sums

    def _followed(self, name: str, args: Any, result: Any) -> Any:
        """Remember what kind of tensor a result is."""
        if name in POSITIONS or (name == "where" and len(args) == 1):
            # Not as many as samples, and they follow from what they are in.
            self.planned.add(*tree_leaves(result))
            return result
        inputs = [one for one in _flat(args) if isinstance(one, Tensor)]
        trains = any(one.requires_grad or one in self.trained for one in inputs)
        if isinstance(result, tuple | list):
            parts = [
                p for p in tree_leaves(result) if isinstance(p, Tensor) and not p.requires_grad
            ]
            self.steps.noted.backwards += name == "grad" and bool(
                parts
            )  # as torch.autograd.backward
            self.trained.add(*(one for one in parts if trains and one.dim()))
        if not isinstance(result, Tensor) or result.requires_grad or is_lazy(result):
            return result
        self._follow(name, args, inputs, result)
        if _drawn_from_outputs(name, inputs):
            return result
        if trains:
            if result.dim():  # a number that is computed from a loss is no weight
                self.trained.add(result)
        elif (name == "__getitem__" and result.dim() < 2 and _is_number(_first(args[1]))) or (
            name not in ("stack", "cat") and any(x in self.single for x in inputs)
        ):
            self.single.add(result)
        return result

    def _follow(self, name: str, args: Any, inputs: list[Tensor], result: Tensor) -> None:
        if _changes(name):
            self._forget(result)
            if name in SUMS and not self.steps.part.late and any(map(self._known, inputs[1:])):
                self.sums.add(result if result._base is None else result._base)
        elif any(self._is_sum(one) for one in inputs):
            slices = name == "__getitem__" and isinstance(_first(args[1]), slice)
            slices = name == "narrow" or (slices and not _all_rows(args[1]))
            (self.rows_of_sums if slices else self.sums).add(result)
        elif name in TAKES | DRAWN or (name == "__getitem__" and not _all_rows(args[1])):
            return
        else:
            for kind in (self.planned, self.loaded):
                if any(one in kind for one in inputs):
                    kind.add(result)

    def _given(
        self, site: Any, args: tuple[Any, ...], others: Iterable[Any] = ()
    ) -> tuple[Any, ...]:
        """The arguments of a call, each as the plan says. Of `others`, numbers are noted."""
        given = tuple(
            self._planned((*site, n), one, replaced=False)
            if isinstance(one, Tensor) and self._is_data(one)
            else one
            for n, one in enumerate(args)
        )
        turn = self._turn(site)
        lengths = [len(one) if isinstance(one, Tensor) and one.dim() else 0 for one in given]
        handed = self.steps.handed
        if handed is None:
            plain = [one for one in (*given, *others) if isinstance(one, int | float | str)]
            self.steps.recorded.calls[site, turn] = lengths, repr(plain)
        elif (
            self.steps.part.one
            and not self.steps.part.spread
            and site[-1] not in PAIRS_NO_ROWS
            and (site, turn) in handed.records[0].calls
        ):
            return self._as_long(given, lengths, handed.records[0].calls[site, turn][0])
        return given

    def _as_long(
        self, given: tuple[Any, ...], lengths: list[int], before: list[int]
    ) -> tuple[Any, ...]:
        """Repeat constants as long as one rank's batch, if the batch holds all ranks' samples."""
        world = len(self.steps.handed.records) if self.steps.handed else 1
        world *= 2 if self.steps.now == TWICE else 1
        grown = {
            old for old, new in zip(before, lengths, strict=False) if old and new == world * old
        }
        if world == 1 or len(before) != len(given):
            return given
        return tuple(
            torch.cat([one] * world)
            if old in grown and new == old and isinstance(one, Tensor) and self._is_data(one)
            else one
            for one, new, old in zip(given, lengths, before, strict=True)
        )

    def marked(self, place: Any, value: Any) -> Any:
        """What to use instead of a leaf of a marked batch."""
        if not isinstance(value, Tensor) or not value.dim() or self.steps.now == LATER:
            return value
        with self.unseen():
            return self._planned((*place, MARKED), value)

    def _planned(self, place: Any, value: Tensor, replaced: bool = True) -> Tensor:
        """`value`, written down, or what the plan says instead.

        `replaced`: also if all ranks had the same, as for samples that are drawn.
        """
        handed, key = self.steps.handed, (place, self._turn(place))
        if is_marked(key) or not self._known(value):
            self.entries[place] += 1
        if handed is None:
            self._record(key, value, replaced)
            return value
        per_rank = handed.of_each_rank(key, self.steps.now)
        if self._known(value):
            return value
        if self.steps.now == DEAL and place[-1] in DRAWN and handed.drawn_alike(key):
            self.steps.noted.delivered.append(line_of(place))
        if per_rank is None and self.steps.part.one and place[-1] in DRAWN:
            self.steps.noted.doubts.append(OFTEN.format(line_of(place)))
        if not is_marked(key) and (per_rank is None or self._left_alone(key, value, replaced)):
            return value
        wanted = self._wanted(handed, key, value)
        if wanted is None:
            self.steps.noted.unjoined.append(line_of(place))
            return value
        rows = len(per_rank[0]) if per_rank else 0
        joined = place[-1] in DRAWN and 0 < rows < len(wanted)
        if joined and handed.batch_lengths and rows not in handed.batch_lengths:
            self.steps.noted.doubts.append(NOT_OF_SAMPLES.format(line_of(place)))
        if not (wanted.shape == value.shape and alike([wanted, value])):
            value = wanted.clone()
        self.planned.add(value)
        return value

    def _wanted(self, handed: Handed, key: Key, value: Tensor) -> Tensor | None:
        """The samples of the plan on the device of those that they replace; None without any.

        What all ranks draw alike is drawn once per rank if there is a row for each of all samples;
        what all are sent, too if it has as many rows as a batch.
        """
        now = OWN if self.steps.now == TWICE else self.steps.now
        copies = 2 if self.steps.now == TWICE else 1
        rows = handed.rows(now, key)
        per_rank = handed.of_each_rank(key, now) or []
        if (
            len(per_rank) > 1
            and rows is not None
            and joinable(per_rank)
            and len(rows) == len(per_rank[0])
        ):
            sent = is_delivered(key) and self.steps.part.one and now != COPIES
            grown = len(value) == copies * len(per_rank) * len(rows)
            if not (grown or (sent and len(rows) in handed.lengths)):
                return rows.to(value.device)  # no samples
            rows = torch.cat(per_rank)
        if copies == 2 and rows is not None:
            rows = handed.twice(key, rows)
        return None if rows is None else rows.to(value.device)

    def _record(self, key: Key, value: Tensor, replaced: bool) -> None:
        self.bytes += value.nbytes
        if self.bytes < BYTES:
            # On the CPU: the other ranks, and one process, may have another GPU.
            self.steps.recorded.samples[key] = value.detach().to("cpu", copy=True)
        if self._known(value):
            self.steps.recorded.derived.add(key)
        elif replaced:  # what a function is given stays as it is in the script
            self.planned.add(value)

    def _left_alone(self, key: Key, value: Tensor, replaced: bool) -> bool:
        """Whether the script computes this from samples or sizes, so that it follows by itself."""
        handed, place = self.steps.handed, key[0]
        assert handed is not None
        assert isinstance(place, tuple)
        name = _name(place)
        if name == DELIVERED:
            return False
        if handed.loaded and name not in DRAWN:
            return True
        if not self.steps.part.late and handed.origin(key)[1] in handed.records[0].derived:
            return True
        if handed.of_sizes(key) or (not replaced and handed.same_everywhere(key)):
            return True
        if not self.steps.part.one or name in DRAWN | CHOOSES:
            return False
        if self.steps.count == 0 and handed.follows(key, value.cpu()):
            self.left.add(key)
        return key in self.left

    def unlike_the_first(self, optimizer: int) -> bool:
        """Whether samples came into this step where none came into the optimizer's first, or not as
        often.
        """
        first = self.first_entries.setdefault(optimizer, self.entries.copy())
        loaded = self.steps.handed is not None and self.steps.handed.loaded
        of_no_loader = DRAWN | {DELIVERED}
        return any(
            first[place] != count
            for place, count in self.entries.items()
            if not loaded or _name(place) in of_no_loader
        )


def _changes(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _name(place: Place) -> Any:
    """The function at a place, also if the place is one of its arguments."""
    return place[-1] if isinstance(place[-1], str) else place[-2]


def _drawn_from_outputs(name: str, inputs: list[Tensor]) -> bool:
    """Whether this draws a sample per row of a model's output: actions, or noise of its shape."""
    if name not in DRAWN:
        return False
    outputs = any(one.requires_grad and not one.is_leaf for one in inputs)
    return name in CHOSEN or (name.endswith("_like") and outputs)


def _flat(args: Any) -> Iterator[Any]:
    for one in args:
        if isinstance(one, list | tuple):
            yield from one
        else:
            yield one


def _caller(frame: Any, function: Any) -> Any:
    """The frame that called `function`, which has its own frame if it is written in Python."""
    own = getattr(function, "__code__", None)
    while frame.f_code is own or frame.f_globals.get("__name__") == "torch.overrides":
        frame = frame.f_back
    return frame


def _all_rows(index: Any) -> bool:
    """Whether an index keeps all rows in their order."""
    first = _first(index)
    return first is Ellipsis or (isinstance(first, slice) and first == slice(None))


def _first(index: Any) -> Any:
    """What an index says of the first dimension."""
    return index[0] if isinstance(index, tuple) and index else index


def _is_number(index: Any) -> bool:
    return isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
