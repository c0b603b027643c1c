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

from ddp_doctor.certificate.calls import hook_call
from ddp_doctor.certificate.files import Place
from ddp_doctor.certificate.marks import handlers
from ddp_doctor.certificate.plan import DEAL, LATER, TWICE
from ddp_doctor.certificate.premises import LOSSES
from ddp_doctor.certificate.samples import (
    DELIVERED,
    FORWARD,
    MARKED,
    Key,
    alike,
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
    "At {}, the random numbers are not one per sample. Whether each sample meets, in one process, "
    "the numbers that it met on its rank is not known."
)
INDEXED = (
    "At {}, the indices of every rank begin at its own first row. In one process, all point to "
    "the first rank's rows."
)
UNREPLACED = (
    "What the script makes at {} is one process's own: it could be given the ranks' samples at the "
    "model only."
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
        self.update((id(tensor), tensor) for tensor in tensors)

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
        self.single_samples = TensorSet()
        self.trained_tensors = TensorSet()  # weights, gradients, activations
        self.sums = TensorSet()  # over groups of samples, and what follows from them
        self.rows_of_sums = TensorSet()
        self.plan_samples = TensorSet()  # of this step's plan, and what is computed from them
        self.loader_samples = TensorSet()  # the same of a loader's samples
        self.computed_keys: set[Key] = set()  # where one process computes values from samples
        self.bytes = 0
        self.is_hidden = False
        self.depth = 0  # calls of models that go on
        self.errors = steps.errors
        self.thread = threading.get_ident()
        steps.is_elsewhere = self.is_elsewhere
        steps.ends += [self.turns.clear, self.entries.clear, self.plan_samples.clear]
        handlers.append(self.plan_leaf)
        nn.Module.__call__ = self._module_call(nn.Module.__call__)  # type: ignore[method-assign]
        # A shard of a weight or of a gradient is no sample.
        hook_call(
            DTensor, "to_local", after=lambda shard, *_, **__: self.trained_tensors.add(shard)
        )
        for name in ("broadcast", "scatter") if dist.is_available() else ():
            hook_call(dist, name, after=self._note_delivery)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Neither write down nor replace what happens inside."""
        before, self.is_hidden = self.is_hidden, True
        try:
            yield
        finally:
            self.is_hidden = before

    @property
    def _measures(self) -> bool:
        """Whether what happens now belongs to a step that is compared."""
        steps = self.steps
        if self.is_hidden or threading.get_ident() != self.thread or steps.updates:
            return False
        return not (transforming() or steps.kind_now == LATER or steps.only_evaluates)

    def _ignores(self) -> bool:
        dealer = self.steps.dealer
        return not self._measures or (dealer is not None and dealer.is_marked)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with self.errors:
            return self._call(function, args, kwargs or {})

    def _call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", "")
        if self._ignores():
            return self._run(function, args, kwargs)
        frame = sys._getframe(2)
        if frame.f_globals.get("__name__") == CONVERTS:
            return function(*args, **kwargs)
        script_frame = None if name in LEFT_ALONE else users_frame(frame)
        if script_frame is None or _builds_a_module(script_frame):
            return self._classify(name, args, self._run(function, args, kwargs))
        site = self._site(script_frame, name)
        if name in SCALES and not self.depth:  # not what a layer scales
            self._note_scale(site, name, args)
        if self.steps.part.is_one:
            self._note_doubts(site, name, args)
        by_script = not self.depth and is_users(_caller(frame, function).f_code.co_filename)
        if by_script:
            args = self._plan_call(site, name, args, kwargs)
        result = self._classify(name, args, self._run(function, args, kwargs))
        dealer = self.steps.dealer
        if dealer and (site, self.turns[site] - 1) in dealer.calls_with_other_numbers:
            self.plan_samples.discard(result)  # a number of this rank went into it
        if name in (MADE if by_script else DRAWN) and self._is_data(result):
            unreplaced = self.steps.part.at_model and by_script
            return self._note_unreplaced(site, result) if unreplaced else self._plan(site, result)
        return result

    def _plan_call(self, site: Place, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The arguments of a call by the script's own line, as the plan says."""
        if name == "__setitem__":  # if a step does it that the first did not, they are unlike
            self.entries[site] += 1
            self.plan_samples.discard(args[0])
        elif not _changes(name) and "out" not in kwargs:
            meets_weights = any(isinstance(a, Tensor) and a.requires_grad for a in _flat(args))
            if meets_weights or not self.steps.part.at_model:
                return self._plan_arguments(site, args)
            self.turns[site] += 1  # it has its turn all the same
        return args

    def _note_scale(self, site: Place, name: str, args: Any) -> None:
        """By what number the script divides outputs, a loss, or gradients here."""
        trains = any(
            isinstance(value, Tensor) and (value.requires_grad or value in self.trained_tensors)
            for value in args
        )
        numbers = [float(a) for a in args if isinstance(a, int | float) and a]
        if trains and numbers:
            divides = name.lstrip("_").removeprefix("i").startswith(("div", "true"))
            divisor = numbers[0] if divides else 1 / numbers[0]
            self.steps.notes.scales[line_of(site), site.instruction] = divisor

    def _note_doubts(self, site: Place, name: str, args: Any) -> None:
        """What one process may do in another way than the ranks, though its samples are theirs."""
        source = args[0] if args else None
        if not isinstance(source, Tensor) or self.steps.dealer is None:
            return
        index = next((value for value in args[1:] if isinstance(value, Tensor)), None)
        if name not in INDEXES or type(index) is not Tensor or not source.dim():
            return
        if index.is_floating_point() or index.layout != torch.strided:
            return
        rows, odd = divmod(len(source), len(self.steps.dealer.records))
        points = self._is_planned(index) and index.numel() and index.dtype != torch.bool
        if points and not odd and not isinstance(source, nn.Parameter) and int(index.max()) < rows:
            self.steps.notes.doubts.append(INDEXED.format(line_of(site)))
        if name == "__getitem__" and source in self.trained_tensors and not source.requires_grad:
            self.steps.notes.doubts.append(REORDERED.format(line_of(site)))

    def _note_unreplaced(self, site: Place, value: Tensor) -> Tensor:
        """Samples that are not replaced where they are made: what else uses them is not known."""
        key = (site, self._turn(site))
        per_rank = self.steps.dealer.per_rank(key) if self.steps.dealer else None
        if per_rank is None or not alike(per_rank):
            self.steps.notes.doubts.append(UNREPLACED.format(line_of(site)))
        return value

    def _turn(self, place: Place) -> int:
        """How often this step was here before."""
        self.turns[place] += 1
        return self.turns[place] - 1

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call it, and note losses and half precision. What it raises is the script's affair."""
        name = getattr(function, "__name__", "")
        if name in LOSSES and self._measures:
            self.steps.premises.note_loss(name, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            if not self.errors.depth:
                self.errors.script_error = error
            raise
        if isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            self.steps.notes.uses_half = True
        return result

    def _site(self, frame: Any, name: str) -> Place:
        """A place in the script. What evaluates and trains has a place for each."""
        code = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
        return Place(*code, self.steps.calls.evaluates, name)

    def _module_call(self, call: Any) -> Any:
        """The call of a module: what it is given is a sample, what it does is a model's affair."""

        @functools.wraps(call)
        def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.depth or not self._measures:
                return call(module, *args, **kwargs)
            with self.errors.in_hook():
                args = self._before_module(module, args, kwargs, sys._getframe(1))
                self.steps.before_call(module, args, kwargs)
            has_parameters = any(True for _ in module.parameters())
            self.depth += has_parameters
            try:
                result = call(module, *args, **kwargs)
            finally:
                self.depth -= has_parameters
                self.steps.state.note_counters()
            with self.errors.in_hook(), self.hidden():
                self.steps.after_call(module, result)
            return result

        return call_module

    def _before_module(self, module: nn.Module, args: Any, kwargs: Any, frame: Any) -> Any:
        if self._ignores():
            return args
        with self.hidden():
            self.trained_tensors.add(*module.buffers())
            if not is_users(frame.f_code.co_filename):
                return args
            samples = self._plan_arguments(self._site(frame, FORWARD), args, kwargs.values())
            evaluates = self.steps.part.at_model and not torch.is_grad_enabled()
            return args if evaluates else samples  # it has its turn all the same

    def _note_delivery(self, work: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """A collective in which one rank says what the others get: their rows, beside their own."""
        frame = sys._getframe(2)
        replaces = not self._ignores() and not self.steps.part.at_model
        if replaces and is_users(frame.f_code.co_filename):
            with self.errors.in_hook():
                if work is not None:
                    work.wait()
                self._deliver(self._site(frame, DELIVERED), tensor)

    def _deliver(self, place: Place, tensor: Any) -> None:
        with self.hidden():
            if not self._is_data(tensor) or self.steps.is_trained(tensor):
                return
            self._forget(tensor)
            value = self._plan(place, tensor)
            if value is not tensor:
                if value.shape != tensor.shape or self.steps.kind_now == DEAL:
                    self.steps.notes.deliveries.append(line_of(place))
                tensor.data = value
                self.plan_samples.add(tensor)

    def note_batch(self, batch: Any) -> Any:
        """Note that a loader's batch has its samples from the plan already."""
        self.loader_samples.add(*tensors_in(batch, most=1000))
        return batch

    def _is_planned(self, tensor: Tensor) -> bool:
        """Whether a tensor is a sample of the plan or computed from one: nothing is left to do."""
        return tensor in self.plan_samples or tensor in self.loader_samples

    def _forget(self, tensor: Any) -> None:
        """A tensor holds other values now, which nobody knows."""
        self.plan_samples.discard(tensor)
        self.loader_samples.discard(tensor)

    def _is_data(self, tensor: Any) -> bool:
        return not (
            type(tensor) is not Tensor  # a parameter, a sharded tensor
            or tensor.is_meta
            or tensor.requires_grad
            or tensor.dim() == 0
            or tensor in self.single_samples
            or tensor in self.trained_tensors
            or self._is_sum(tensor)
        )

    def _is_sum(self, tensor: Tensor) -> bool:
        """Whether a tensor holds sums over samples, or what is computed from them: no samples.

        A slice of their rows may be: of neighbors that were summed for each node of a graph.
        """
        if tensor in self.rows_of_sums:
            return False
        return tensor in self.sums or tensor._base in self.sums

    def _classify(self, name: str, args: Any, result: Any) -> Any:
        """Remember what kind of tensor a result is."""
        if name in POSITIONS or (name == "where" and len(args) == 1):
            # Not as many as samples, and they follow from what they are in.
            self.plan_samples.add(*tree_leaves(result))
            return result
        inputs = [value for value in _flat(args) if isinstance(value, Tensor)]
        trains = any(value.requires_grad or value in self.trained_tensors for value in inputs)
        if isinstance(result, tuple | list):
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            parts = [leaf for leaf in leaves if not leaf.requires_grad]
            # As torch.autograd.backward.
            self.steps.notes.backwards += name == "grad" and bool(parts)
            self.trained_tensors.add(*(part for part in parts if trains and part.dim()))
        if not isinstance(result, Tensor) or result.requires_grad or is_lazy(result):
            return result
        self._classify_samples(name, args, inputs, result)
        if _drawn_from_outputs(name, inputs):
            return result
        if trains:
            if result.dim():  # a number that is computed from a loss is no weight
                self.trained_tensors.add(result)
        elif (name == "__getitem__" and result.dim() < 2 and _is_number(_first(args[1]))) or (
            name not in ("stack", "cat") and any(x in self.single_samples for x in inputs)
        ):
            self.single_samples.add(result)
        return result

    def _classify_samples(self, name: str, args: Any, inputs: list[Tensor], result: Tensor) -> None:
        if _changes(name):
            self._forget(result)
            planned = any(map(self._is_planned, inputs[1:]))
            if name in SUMS and planned and not self.steps.part.at_model:
                self.sums.add(result if result._base is None else result._base)
        elif any(map(self._is_sum, inputs)):
            slices = name == "__getitem__" and isinstance(_first(args[1]), slice)
            slices = name == "narrow" or (slices and not _all_rows(args[1]))
            (self.rows_of_sums if slices else self.sums).add(result)
        elif name in TAKES | DRAWN or (name == "__getitem__" and not _all_rows(args[1])):
            return
        else:
            for samples in (self.plan_samples, self.loader_samples):
                if any(value in samples for value in inputs):
                    samples.add(result)

    def _plan_arguments(
        self, site: Place, args: tuple[Any, ...], others: Iterable[Any] = ()
    ) -> tuple[Any, ...]:
        """The arguments of a call, each as the plan says. Of `others`, numbers are noted."""
        values = tuple(
            self._plan(site._replace(argument=n), v, is_made=False) if self._is_data(v) else v
            for n, v in enumerate(args)
        )
        turn = self._turn(site)
        lengths = [len(v) if isinstance(v, Tensor) and v.dim() else 0 for v in values]
        part, dealer = self.steps.part, self.steps.dealer
        if dealer is None:
            numbers = [v for v in (*values, *others) if isinstance(v, int | float | str)]
            self.steps.record.calls[site, turn] = lengths, repr(numbers)
        elif part.is_one and not part.all_passes and site.function not in PAIRS_NO_ROWS:
            of_rank = dealer.records[0].calls.get((site, turn))
            return self._repeat_constants(values, lengths, of_rank[0]) if of_rank else values
        return values

    def _repeat_constants(
        self, values: tuple[Any, ...], lengths: list[int], of_rank: list[int]
    ) -> tuple[Any, ...]:
        """Repeat constants as long as one rank's batch, if the batch holds all ranks' samples."""
        world = len(self.steps.dealer.records) if self.steps.dealer else 1
        world *= 2 if self.steps.kind_now == TWICE else 1
        pairs = zip(of_rank, lengths, strict=False)
        batches = {old for old, new in pairs if old and new == world * old}
        if world == 1 or len(of_rank) != len(values):
            return values
        return tuple(
            torch.cat([value] * world)
            if old in batches and new == old and self._is_data(value)
            else value
            for value, new, old in zip(values, lengths, of_rank, strict=True)
        )

    def plan_leaf(self, place: tuple[str, int, int], value: Any) -> Any:
        """What to use instead of a leaf of a marked batch."""
        if not isinstance(value, Tensor) or not value.dim() or self.steps.kind_now == LATER:
            return value
        with self.hidden():
            return self._plan(Place(*place, function=MARKED), value)

    def _plan(self, place: Place, value: Tensor, is_made: bool = True) -> Tensor:
        """`value`, written down, or what the plan says instead.

        `is_made`: here, and not only used; then it is replaced also if all ranks had the same.
        """
        steps, dealer, key = self.steps, self.steps.dealer, (place, self._turn(place))
        is_marked = place.function == MARKED
        is_drawn = place.function in DRAWN and place.argument < 0
        if is_marked or not self._is_planned(value):
            self.entries[place] += 1
        if dealer is None:
            self._record(key, value, is_made)
            return value
        per_rank = dealer.per_rank(key, steps.kind_now)
        if self._is_planned(value):
            return value
        if steps.kind_now == DEAL and is_drawn and dealer.drawn_alike(key):
            steps.notes.deliveries.append(line_of(place))
        if per_rank is None and steps.part.is_one and is_drawn:
            steps.notes.doubts.append(OFTEN.format(line_of(place)))
        if not is_marked and (per_rank is None or self._is_computed(key, value, is_made)):
            return value
        samples = dealer.rows(steps.kind_now, key, len(value))
        if samples is None:
            steps.notes.join_failures.append(line_of(place))
            return value
        samples = samples.to(value.device)
        rows = len(per_rank[0]) if per_rank else 0
        joined = is_drawn and 0 < rows < len(samples)
        if joined and dealer.loader_lengths and rows not in dealer.loader_lengths:
            steps.notes.doubts.append(NOT_OF_SAMPLES.format(line_of(place)))
        if not (samples.shape == value.shape and alike([samples, value])):
            value = samples.clone()
        self.plan_samples.add(value)
        return value

    def _record(self, key: Key, value: Tensor, is_made: bool) -> None:
        self.bytes += value.nbytes
        if self.bytes < BYTES:
            # On the CPU: the other ranks, and one process, may have another GPU.
            self.steps.record.samples[key] = value.detach().to("cpu", copy=True)
        if self._is_planned(value):
            self.steps.record.derived_keys.add(key)
        elif is_made:  # what a function is given stays as it is in the script
            self.plan_samples.add(value)

    def _is_computed(self, key: Key, value: Tensor, is_made: bool) -> bool:
        """Whether the script computes this from samples or sizes, so that it follows by itself."""
        dealer, name = self.steps.dealer, key[0].function
        assert dealer is not None
        if name == DELIVERED:
            return False
        if dealer.has_loader and name not in DRAWN:
            return True
        derived = dealer.origin(key)[1] in dealer.records[0].derived_keys
        if derived and not self.steps.part.at_model:
            return True
        if dealer.depends_on_sizes(key) or (not is_made and dealer.same_everywhere(key)):
            return True
        if not self.steps.part.is_one or name in DRAWN | CHOOSES:
            return False
        if self.steps.count == 0 and dealer.follows(key, value.cpu()):
            self.computed_keys.add(key)
        return key in self.computed_keys

    def is_elsewhere(self, optimizer: int) -> bool:
        """Whether samples came into this step where none came into the optimizer's first, or not as
        often.
        """
        first = self.first_entries.setdefault(optimizer, self.entries.copy())
        loader = self.steps.dealer is not None and self.steps.dealer.has_loader
        of_no_loader = DRAWN | {DELIVERED}
        return any(
            first[place] != count
            for place, count in self.entries.items()
            if not loader or place.function in of_no_loader
        )


def _builds_a_module(frame: Any) -> bool:
    """Whether a module's constructor runs: what it draws are weights and buffers, no samples."""
    builds = frame.f_code.co_name == "__init__"
    return builds and isinstance(frame.f_locals.get("self"), nn.Module)


def _changes(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _drawn_from_outputs(name: str, inputs: list[Tensor]) -> bool:
    """Whether this draws a sample per row of a model's output: actions, or noise of its shape."""
    if name not in DRAWN:
        return False
    outputs = any(value.requires_grad and not value.is_leaf for value in inputs)
    return name in CHOSEN or (name.endswith("_like") and outputs)


def _flat(args: Any) -> Iterator[Any]:
    for value in args:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _caller(frame: Any, function: Any) -> Any:
    """The frame that called `function`, which has its own frame if it is written in Python."""
    code = getattr(function, "__code__", None)
    while frame.f_code is code or frame.f_globals.get("__name__") == "torch.overrides":
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
