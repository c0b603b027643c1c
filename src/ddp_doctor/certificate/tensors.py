"""Samples that come from no loader and have no mark: random draws, slices, converted arrays.

One process of a script makes its own samples only. So the tensors that the script's own lines make
and use are written down in the first step, by place and turn; then each place gets what the plan
says. What is computed from these tensors, sizes and counts included, follows by itself. Weights,
gradients, activations, and all that is computed from them are left alone. Inside a model, and in a
script that has a data loader, only random draws are samples, and what one rank sends to all: one
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


class Tensors(TorchFunctionMode):
    """Sees every function of torch that the script calls."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.turns: dict[Place, int] = {}
        # How often samples came into a step at a place, and into the first step.
        self.entries: Counter[Place] = Counter()
        self.first_entries: dict[int, Counter[Place]] = {}  # by the optimizer that stepped then
        # By their ids: tensors that are one sample each; weights, gradients, activations.
        self.single: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.trained: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.sums: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # and what follows
        self.rows_of_sums: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        # Samples of this step's plan, those of a loader, and what is computed from them.
        self.planned: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.loaded: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
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
        DTensor.to_local = self._local(DTensor.to_local)  # type: ignore[method-assign]
        for name in ("broadcast", "scatter") if dist.is_available() else ():
            setattr(dist, name, self._delivered(getattr(dist, name)))

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
        other = self.hidden or threading.get_ident() != self.thread or self.steps.updating
        other = other or transforming()
        return not (other or self.steps.now == LATER or self.steps.only_evaluates)

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
        changes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        direct = not self.inside and is_users(_caller(frame, function).f_code.co_filename)
        if direct:
            if name == "__setitem__":  # if a step does it that the first did not, they are unlike
                self.entries[site] += 1
                self.planned.pop(id(args[0]), None)
            elif not changes and "out" not in kwargs:
                if self._in_time(args):
                    args = self._given(site, args)
                else:
                    self.turns[site] = self.turns.get(site, 0) + 1  # it has its turn all the same
        result = self._followed(name, args, self._run(function, args, kwargs))
        if self.steps.handed and (site, self.turns.get(site, 0) - 1) in self.steps.handed.mixed:
            self.planned.pop(id(result), None)  # a number of this rank went into it
        if name in (MADE if direct else DRAWN) and self._is_data(result):
            late = self.steps.part.late and direct
            return self._made_late(site, result) if late else self._planned(site, result)
        return result

    def _note_scale(self, site: Place, name: str, args: Any) -> None:
        """By what number the script divides outputs, a loss, or gradients here."""
        trains = [a for a in args if isinstance(a, Tensor) and (a.requires_grad or self._trains(a))]
        numbers = [float(a) for a in args if isinstance(a, int | float) and a]
        if trains and numbers:
            divides = name.lstrip("_").removeprefix("i").startswith(("div", "true"))
            divisor = numbers[0] if divides else 1 / numbers[0]
            self.steps.scales[line_of(site), int(site[2])] = divisor

    def _trains(self, tensor: Tensor) -> bool:
        """Whether this is a weight, a gradient, or computed from them."""
        return self.trained.get(id(tensor)) is tensor

    def _note_doubts(self, site: Place, name: str, args: Any) -> None:
        """What one process may do in another way than the ranks, though its samples are theirs."""
        source = args[0] if args else None
        if not isinstance(source, Tensor) or self.steps.handed is None:
            return
        world = len(self.steps.handed.of)
        trains = source.requires_grad or self.trained.get(id(source)) is source
        index = next((one for one in args[1:] if isinstance(one, Tensor)), None)
        if name not in INDEXES or type(index) is not Tensor or not source.dim():
            return
        if index.is_floating_point() or index.layout != torch.strided:
            return
        rows, odd = divmod(len(source), world)
        known = self._known(index) and index.numel() and index.dtype != torch.bool
        if known and not odd and not isinstance(source, nn.Parameter) and int(index.max()) < rows:
            self.steps.doubts.append(INDEXED.format(line_of(site)))
        if name == "__getitem__" and trains and not source.requires_grad:
            self.steps.doubts.append(REORDERED.format(line_of(site)))

    def _made_late(self, site: Place, value: Tensor) -> Tensor:
        """Samples that are not replaced where they are made: what else uses them is not known."""
        turn = self.turns.get(site, 0)
        self.turns[site] = turn + 1
        every = self.steps.handed.everyones((site, turn)) if self.steps.handed else None
        if every is None or not alike(every):
            self.steps.unjoined.append(line_of(site))
        return value

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
            self.steps.half = True
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
                return call(module, *args, **kwargs)
            finally:
                self.inside -= model
                self.steps.state.note_counters()

        return called

    def _before_module(self, module: nn.Module, args: Any, kwargs: Any, frame: Any) -> Any:
        if self._hidden():
            return args
        with self.unseen():
            for buffer in module.buffers():
                self.trained[id(buffer)] = buffer
            if not is_users(frame.f_code.co_filename):
                return args
            given = self._given(self._site(frame, FORWARD), args, kwargs.values())
            evaluates = self.steps.part.late and not torch.is_grad_enabled()
            return args if evaluates else given  # it has its turn all the same

    def _local(self, to_local: Any) -> Any:
        """A shard of a weight or of a gradient is no sample."""

        @functools.wraps(to_local)
        def local(*args: Any, **kwargs: Any) -> Any:
            shard = to_local(*args, **kwargs)
            self.trained[id(shard)] = shard
            return shard

        return local

    def _delivered(self, call: Any) -> Any:
        """A collective in which one rank says what the others get: their rows, beside their own."""

        @functools.wraps(call)
        def delivered(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            work = call(tensor, *args, **kwargs)
            frame = sys._getframe(1)
            if not self._hidden() and not self.steps.part.late and is_users(_file(frame)):
                with self.errors.in_hook():
                    if work is not None:
                        work.wait()
                    self._deliver(self._site(frame, DELIVERED), tensor)
            return work

        return delivered

    def _deliver(self, place: Place, tensor: Any) -> None:
        with self.unseen():
            if not self._is_data(tensor) or self.steps.is_trained(tensor):
                return
            for kind in (self.planned, self.loaded):
                kind.pop(id(tensor), None)
            value = self._planned(place, tensor)
            if value is not tensor:
                if value.shape != tensor.shape or self.steps.now == DEAL:
                    self.steps.delivered.append(line_of(place))
                tensor.data = value
                self.planned[id(tensor)] = tensor

    def from_loader(self, batch: Any) -> Any:
        """Note that a batch has its samples from the plan already."""
        self.loaded.update((id(one), one) for one in tensors_in(batch, most=1000))
        return batch

    def _known(self, tensor: Tensor) -> bool:
        """Whether a tensor is a sample of the plan or computed from one: nothing is left to do."""
        return any(kind.get(id(tensor)) is tensor for kind in (self.planned, self.loaded))

    def _is_data(self, tensor: Any) -> bool:
        return not (
            type(tensor) is not Tensor  # a parameter, a sharded tensor
            or tensor.is_meta
            or tensor.requires_grad
            or tensor.dim() == 0
            or self.single.get(id(tensor)) is tensor
            or self.trained.get(id(tensor)) is tensor
            or self._is_sum(tensor)
        )

    def _is_sum(self, tensor: Tensor) -> bool:
        """Whether a tensor holds sums over samples, or what is computed from them: no samples.

        A slice of their rows may be: of neighbors that were summed for each node of a graph.
        """
        if self.rows_of_sums.get(id(tensor)) is tensor:
            return False
        whole = tensor if tensor._base is None else tensor._base
        return any(self.sums.get(id(one)) is one for one in (tensor, whole))

    def _followed(self, name: str, args: Any, result: Any) -> Any:
        """Remember what kind of tensor a result is."""
        if name in POSITIONS or (name == "where" and len(args) == 1):
            # Not as many as samples, and they follow from what they are in.
            self.planned.update((id(one), one) for one in tree_leaves(result))
            return result
        inputs = [one for one in _flat(args) if isinstance(one, Tensor)]
        trains = any(one.requires_grad or self.trained.get(id(one)) is one for one in inputs)
        if isinstance(result, tuple | list):
            parts = [
                p for p in tree_leaves(result) if isinstance(p, Tensor) and not p.requires_grad
            ]
            self.steps.backwards += name == "grad" and bool(parts)  # as torch.autograd.backward
            self.trained.update((id(one), one) for one in parts if trains and one.dim())
        if not isinstance(result, Tensor) or result.requires_grad or is_lazy(result):
            return result
        self._follow(name, args, inputs, result)
        if _drawn_from_outputs(name, inputs):
            return result
        if trains:
            if result.dim():  # a number that is computed from a loss is no weight
                self.trained[id(result)] = result
        elif (name == "__getitem__" and result.dim() < 2 and _one_index(args[1])) or (
            name not in ("stack", "cat") and any(self.single.get(id(x)) is x for x in inputs)
        ):
            self.single[id(result)] = result
        return result

    def _follow(self, name: str, args: Any, inputs: list[Tensor], result: Tensor) -> None:
        if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
            self.planned.pop(id(result), None)
            self.loaded.pop(id(result), None)
            if (
                name in SUMS
                and not self.steps.part.late
                and any(self._known(one) for one in inputs[1:])
            ):
                whole = result if result._base is None else result._base
                self.sums[id(whole)] = whole
        elif any(self._is_sum(one) for one in inputs):
            slices = name == "narrow" or (name == "__getitem__" and _some_rows(args[1]))
            kind = self.rows_of_sums if slices else self.sums
            kind[id(result)] = result
        elif name in TAKES | DRAWN or (name == "__getitem__" and not _all_rows(args[1])):
            return
        else:
            for kind in (self.planned, self.loaded):
                if any(kind.get(id(one)) is one for one in inputs):
                    kind[id(result)] = result

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
        turn = self.turns.get(site, 0)
        self.turns[site] = turn + 1
        lengths = [len(one) if isinstance(one, Tensor) and one.dim() else 0 for one in given]
        handed = self.steps.handed
        if handed is None:
            plain = [one for one in (*given, *others) if isinstance(one, int | float | str)]
            self.steps.recorded.calls[site, turn] = lengths, repr(plain)
        elif (
            self.steps.part.one
            and not self.steps.part.spread
            and site[-1] not in PAIRS_NO_ROWS
            and (site, turn) in handed.of[0].calls
        ):
            return self._as_long(given, lengths, handed.of[0].calls[site, turn][0])
        return given

    def _as_long(
        self, given: tuple[Any, ...], lengths: list[int], before: list[int]
    ) -> tuple[Any, ...]:
        """Repeat constants as long as one rank's batch, if the batch holds all ranks' samples."""
        world = len(self.steps.handed.of) if self.steps.handed else 1
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
        turn = self.turns.get(place, 0)
        self.turns[place] = turn + 1
        handed, key = self.steps.handed, (place, turn)
        if is_marked(key) or not self._known(value):
            self.entries[place] += 1
        if handed is None:
            self._record(key, value, replaced)
            return value
        every = handed.everyones(key, self.steps.now)
        if self._known(value):
            return value
        if self.steps.now == DEAL and place[-1] in DRAWN and handed.drawn_alike(key):
            self.steps.delivered.append(line_of(place))
        if every is None and self.steps.part.one and place[-1] in DRAWN:
            self.steps.doubts.append(OFTEN.format(line_of(place)))
        if not is_marked(key) and (every is None or self._left_alone(key, value, replaced)):
            return value
        wanted = self._wanted(handed, key, value)
        if wanted is None:
            self.steps.unjoined.append(line_of(place))
            return value
        rows = len(every[0]) if every else 0
        joined = place[-1] in DRAWN and 0 < rows < len(wanted)
        if joined and handed.batch_lengths and rows not in handed.batch_lengths:
            self.steps.doubts.append(NOT_OF_SAMPLES.format(line_of(place)))
        if not (wanted.shape == value.shape and alike([wanted, value])):
            value = wanted.clone()
        self.planned[id(value)] = value
        return value

    def _wanted(self, handed: Handed, key: Key, value: Tensor) -> Tensor | None:
        """The samples of the plan on the device of those that they replace; None without any.

        What all ranks draw alike is drawn once per rank if there is a row for each of all samples;
        what all are sent, too if it has as many rows as a batch.
        """
        now = OWN if self.steps.now == TWICE else self.steps.now
        copies = 2 if self.steps.now == TWICE else 1
        rows = handed.rows(now, key)
        every = handed.everyones(key, now) or []
        if len(every) > 1 and rows is not None and joinable(every) and len(rows) == len(every[0]):
            sent = is_delivered(key) and self.steps.part.one and now != COPIES
            grown = len(value) == copies * len(every) * len(rows)
            if not (grown or (sent and len(rows) in handed.lengths)):
                return rows.to(value.device)  # no samples
            rows = torch.cat(every)
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
            self.planned[id(value)] = value

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
        if not self.steps.part.late and handed.origin(key)[1] in handed.of[0].derived:
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


def _name(place: Place) -> Any:
    """The function at a place, also if the place is one of its arguments."""
    return place[-1] if isinstance(place[-1], str) else place[-2]


def _drawn_from_outputs(name: str, inputs: list[Tensor]) -> bool:
    """Whether this draws a sample per row of a model's output: actions, or noise of its shape."""
    if name not in DRAWN:
        return False
    outputs = any(one.requires_grad and not one.is_leaf for one in inputs)
    return name in CHOSEN or (name.endswith("_like") and outputs)


def _file(frame: Any) -> str:
    return str(frame.f_code.co_filename)


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
    first = index[0] if isinstance(index, tuple) and index else index
    return first is Ellipsis or (isinstance(first, slice) and first == slice(None))


def _some_rows(index: Any) -> bool:
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, slice) and first != slice(None)


def _one_index(index: Any) -> bool:
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, int) or (isinstance(first, Tensor) and first.dim() == 0)
