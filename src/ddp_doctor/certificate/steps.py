"""The gradient that the optimizer receives, step by step, from the same weights.

Before the first step, weights that are all zero get small values, so that what is behind them has a
gradient. Before an update the gradients are written to a file. After it weights and buffers are put
back, and the next forward finds no gradients. After the first step the ranks wait for one another's
samples. Once the plan is done, ranks go on with ordinary steps and write down some elements of each
gradient and of each weight.
"""

import contextlib
import functools
import os
import sys
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from ddp_doctor.certificate.files import PATIENCE, read, wait_for, write
from ddp_doctor.certificate.fixed import Fixed
from ddp_doctor.certificate.plan import (
    LATER,
    PLAN,
    PLAN_AHEAD,
    PLAN_USUAL,
    TURNS,
    USUAL,
    WATCHED,
    Part,
)
from ddp_doctor.certificate.premises import Premises
from ddp_doctor.certificate.samples import FORWARD, Handed, Recorded, line_of
from ddp_doctor.facts.containers import transforming
from ddp_doctor.facts.types import CALLS

COMBINES = "combines"  # a file: an optimizer's step calls a collective
TINY = 0.02  # standard deviation of the values that replace zeros


def rank_and_world() -> tuple[int, int]:
    """Of the launcher if there is one, else of the process group; (0, 1) without either."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class Ours:
    """Ends the process on an error of the doctor's own, which no line of the script may catch.

    What the process still does is not wanted. `theirs`: the script's last error.
    """

    theirs: BaseException | None = None
    hooks = 0  # of the doctor that go on

    def guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook, inside of this."""

        @functools.wraps(hook)
        def guarded(*args: Any) -> Any:
            with self.own():
                return hook(*args)

        return guarded

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """What torch raises inside is the doctor's error, too."""
        with self:
            self.hooks += 1
            yield
            self.hooks -= 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and error is not self.theirs:
            traceback.print_exception(error)
            said = f"The doctor failed: {type(error).__name__}: {error}".splitlines()[0]
            sys.stderr.write(f"{said}\n")
            leave(1)


class Steps:
    """Records and repeats. `count` is the number of rounds of the optimizers that have ended."""

    def __init__(self, part: Part, fixed: Fixed) -> None:
        self.part = part
        self.fixed = fixed
        self.ours = Ours()
        self.recorded = Recorded()
        self.handed = _of_all(part, 0) if part.one else None
        self.count = 0
        self.ends: list[Callable[[], None]] = []  # called at the end of each step
        self.unjoined: list[str] = []  # places whose samples could not be joined
        self.numbers: list[str] = []  # places at which the ranks pass other numbers to a model
        self.delivered: list[str] = []  # places of what all ranks have, where it was not planned so
        self.doubts: list[str] = []  # why one process may not stand for the ranks, in sentences
        # Numbers by which the script multiplies or divides outputs, losses, and gradients.
        self.scales: set[float] = set()
        # Whether an optimizer's step does not use the places of its first one.
        self.unlike: Callable[[int], bool] = lambda optimizer: False
        self.backwards = 0
        self.cleared = False  # whether the script has called zero_grad
        self.turn = 0  # steps of all optimizers
        self.filled = False  # whether a weight was zero
        self.combines = False  # whether an optimizer's step calls a collective
        self.half = False  # whether half precision takes part
        self.premises = Premises()
        self.ends.append(self.premises.clear)
        self._made: list[Optimizer] = []
        self._taken: dict[int, int] = {}  # id of an optimizer: its steps
        self._order: list[int] = []  # the optimizers that have stepped, each time
        self._kinds: set[tuple[int, str]] = set()  # the optimizers' steps of the plan
        self._nested = 0
        self.updating = False  # whether an optimizer computes its update: of no samples
        self._comparable = False  # whether the ranks' gradients are worth a look after the plan
        self._kept: list[tuple[Tensor, Tensor]] = []
        # (id of a module, name): the module, the buffer, and its value before this step.
        self._buffers: dict[tuple[int, str], tuple[nn.Module, Tensor, Tensor]] = {}
        # The plain numbers of modules: before a call, and those that calls of this step changed.
        self._numbers: dict[int, tuple[nn.Module, dict[str, int | float]]] = {}
        self._counters: dict[int, tuple[nn.Module, dict[str, int | float]]] = {}
        self._untrained: dict[str, Tensor] = {}  # parameters at the first forward of this step
        # Gradients that the next forward clears. What follows a step may still read them.
        self._used: list[Tensor] = []
        self._started = False
        self._names: dict[int, str] = {}
        self._keys: dict[int, str] = {}  # of the trained parameters, by their ids
        guard = self.ours.guard
        nn.modules.module.register_module_forward_pre_hook(guard(self._before_forward))
        self._note_collectives_in_steps()
        self._note_reductions()
        register_optimizer_step_pre_hook(guard(self._before))
        register_optimizer_step_post_hook(guard(self._after))
        self._evaluated: Callable[[], nn.Module | None] = lambda: None
        self._count_what_is_called()
        self._note_what_evaluates()
        self._note_calls()

    def _note_calls(self) -> None:
        """Places at which the ranks pass other numbers: one process cannot stand for them."""
        handed = self.handed
        mixed = [place for place, _ in handed.mixed] if handed and not handed.marked else []
        self.numbers = [line_of(place) for place in mixed if place[-1] == FORWARD]

    def _note_collectives_in_steps(self) -> None:
        """An optimizer that calls one combines the ranks itself."""

        def noted(call: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(call)
            def collective(*args: Any, **kwargs: Any) -> Any:
                self.combines |= self._nested > 0
                return call(*args, **kwargs)

            return collective

        for name in CALLS if dist.is_available() else ():
            if hasattr(dist, name):
                setattr(dist, name, noted(getattr(dist, name)))

    def _note_reductions(self) -> None:
        if not dist.is_available():
            return
        all_reduce, gather = dist.all_reduce, dist.all_gather_object

        @functools.wraps(gather)
        def gathered(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
            gather(object_list, *args, **kwargs)
            if all(isinstance(one, int | float) for one in object_list):
                self.premises.reduced(torch.tensor([float(sum(object_list))], device="cpu"))

        @functools.wraps(all_reduce)
        def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            work = all_reduce(tensor, *args, **kwargs)
            gradients = (p.grad for p, _ in self._parameters())
            if work is None and self.now != LATER and all(g is not tensor for g in gradients):
                self.premises.reduced(tensor)
            return work

        dist.all_reduce = noted  # type: ignore[assignment]
        dist.all_gather_object = gathered

    def _count_what_is_called(self) -> None:
        init, backward = Optimizer.__init__, torch.autograd.backward
        for owner in (Optimizer, nn.Module):
            owner.zero_grad = self._noted(owner.zero_grad)  # type: ignore[attr-defined]

        def counted_init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._made.append(optimizer)

        def counted_backward(*args: Any, **kwargs: Any) -> None:
            if not any(one.is_meta for one in tree_leaves(args[:1]) if isinstance(one, Tensor)):
                self.backwards += 1
                self.recorded.modes.add(self.evaluates)
            backward(*args, **kwargs)

        Optimizer.__init__ = counted_init  # type: ignore[method-assign]
        torch.autograd.backward = counted_backward

    def _noted(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(zero_grad)
        def noted(*args: Any, **kwargs: Any) -> None:
            self.cleared = True
            zero_grad(*args, **kwargs)

        return noted

    def _note_what_evaluates(self) -> None:
        train = nn.Module.train

        def noted(module: nn.Module, mode: bool = True) -> nn.Module:
            if not mode and self._has_all_that_is_trained(module):
                self._evaluated = weakref.ref(module)
            return train(module, mode)

        nn.Module.train = noted  # type: ignore[method-assign]

    def _has_all_that_is_trained(self, module: nn.Module) -> bool:
        there = set(map(id, module.parameters()))
        return bool(self._made) and all(
            id(p) in there
            for made in self._made
            for group in made.param_groups
            for p in group["params"]
        )

    @property
    def evaluates(self) -> bool:
        """Whether the model that is trained is in evaluation mode now."""
        model = self._evaluated()
        return model is not None and not model.training

    @property
    def only_evaluates(self) -> bool:
        """Whether what happens now is no part of a training step, as far as is known."""
        return self.handed is not None and self.handed.of[0].trains_only and self.evaluates

    @property
    def plan(self) -> tuple[str, ...]:
        """What each step is; see the module of this name."""
        if self.handed.of[0].ahead if self.handed else self.recorded.ahead:
            return PLAN_AHEAD
        return PLAN_USUAL if self.fixed.clips or self.fixed.batch_norm else PLAN

    def kind(self, step: int) -> str:
        """What the samples of a step are."""
        return self.plan[step] if step < len(self.plan) else LATER

    @property
    def now(self) -> str:
        return self.kind(self.count)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or not self._made or transforming():
            return
        self._note_time(module, args)
        while self._used:
            _clear(self._used.pop())
        if self._started:
            return
        self._started = True
        for name, parameter in module.named_parameters():
            self._names.setdefault(id(parameter), name.removeprefix("module."))
        path = self.part.of_ranks("weights.pt")
        listed = self._parameters()
        self.filled = sum(filled(parameter, key) for parameter, key in listed) > 0
        if not self.part.one:
            weights = {key: whole(parameter) for parameter, key in listed}
            if rank_and_world()[0] == 0:
                write(path, weights)
        elif path.exists():
            weights = read(path)
            with torch.no_grad():
                for parameter, key in listed:
                    if key in weights and weights[key].shape == parameter.shape:
                        local = getattr(parameter, "to_local", lambda p=parameter: p)()
                        # Of one process, a shard is the whole. A loss may have been begun.
                        local.data.copy_(weights[key])

    def _note_time(self, module: nn.Module, args: Any) -> None:
        """How long a sequence is whose first dimension is time, or that is read cell by cell."""
        if isinstance(module, nn.RNNCellBase):
            self.premises.cells += 1
            self.premises.in_time(self.premises.cells)
        in_time = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
        if in_time and args and isinstance(args[0], Tensor) and args[0].dim() == 3:
            self.premises.in_time(len(args[0]))

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Write down what a model that is trained is given, and the buffers of each module."""
        self._note_untrained(module)
        if not torch.is_grad_enabled():
            return
        self._before_forward(module, args)  # from the weights with which the forward starts
        self._note_buffers(module)
        trained = [p for p in module.parameters() if id(p) in self._keys]
        if trained:
            for name, parameter in module.named_parameters():
                self._names.setdefault(id(parameter), name.removeprefix("module."))
            plain = [sampled(p).double() for p in trained if not hasattr(p, "full_tensor")]
            weights = sum(float(part @ _waves(len(part))) for part in plain)
            self.premises.model(min(self._keys[id(p)] for p in trained), (args, kwargs), weights)

    def _note_untrained(self, module: nn.Module) -> None:
        """Parameters that nobody trains, of references and teachers, too."""
        if not self._keys:
            self._keys = {id(parameter): key for parameter, key in self._parameters()}
        its = {id(parameter) for parameter in module.parameters()}
        within = "" if its & self._keys.keys() else f"{type(module).__name__}."
        for name, parameter in module.named_parameters():
            plain_float = type(parameter.data) is Tensor and parameter.is_floating_point()
            if plain_float and not parameter.requires_grad and id(parameter) not in self._keys:
                key = within + name.removeprefix("module.")
                self._untrained.setdefault(key, sampled(parameter))

    def _note_buffers(self, module: nn.Module) -> None:
        """Buffers and plain numbers. A criterion has some, too: a count that seeds its draws."""
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                known = buffer is None or is_lazy(buffer) or (id(owner), name) in self._buffers
                if not known:
                    self._buffers[id(owner), name] = owner, buffer, buffer.detach().clone()
            if not isinstance(owner, DistributedDataParallel):  # which counts for itself
                numbers = {k: v for k, v in vars(owner).items() if type(v) in (int, float)}
                self._numbers.setdefault(id(owner), (owner, numbers))

    def after_call(self) -> None:
        """Note the numbers that a call changed. What the script itself counts up stays so."""
        for owner, numbers in self._numbers.values():
            now = vars(owner)
            changed = {
                name: number
                for name, number in numbers.items()
                if type(now.get(name)) is not type(number) or now[name] != number
            }
            before = self._counters.get(id(owner), (owner, {}))[1]
            self._counters[id(owner)] = owner, changed | before
        self._numbers.clear()

    def _parameters(self) -> list[tuple[Tensor, str]]:
        """All that is trained, with its keys."""
        listed = (each for optimizer in self._made for each in self._listed(optimizer))
        return [(parameter, key) for key, _, parameter in listed]

    def is_trained(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with a weight or its gradient, or there are none yet."""
        held = [one for p, _ in self._parameters() for one in (p, p.grad)]
        plain = [o for o in held if o is not None and o.layout == torch.strided]
        plain = [o for o in plain if not hasattr(o, "full_tensor")]
        start = tensor.untyped_storage().data_ptr()
        return not held or any(one.untyped_storage().data_ptr() == start for one in plain)

    def _listed(self, optimizer: Optimizer) -> list[tuple[str, str, Tensor]]:
        """(key, name, parameter). A key counts optimizers and parameters as they are made."""
        at = next((n for n, made in enumerate(self._made) if made is optimizer), len(self._made))
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        return [
            (f"{at}.{n}", self._names.get(id(p), f"parameter {n} of optimizer {at}"), p)
            for n, p in enumerate(listed)
        ]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._nested += 1
        if self._nested > 1:
            return None
        guard = self.ours.guard
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self.updating = True
        if not callable(closure):
            self._record(optimizer)
            return None

        recorded = False

        def then_record() -> Any:
            nonlocal recorded
            self.updating = False
            loss = closure()
            self.updating = True
            if not recorded:  # it may be called again, with other weights
                guard(self._record)(optimizer)
            recorded = True
            return loss

        if len(args) > 1:
            return (args[0], then_record, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_record}

    def _record(self, optimizer: Optimizer) -> None:
        step = self._taken.setdefault(id(optimizer), 0)
        rank, world = rank_and_world()
        at = list(self._taken).index(id(optimizer))
        self._order.append(at)
        kind = self._kind_of(at)
        listed = self._listed(optimizer)
        plain = [p for _, _, p in listed if not hasattr(p, "full_tensor")]
        self._comparable = world > 1 and len(plain) == len(listed)
        copied = sampled if kind == LATER else whole
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        facts = {
            "rank": rank,
            "optimizer": at,
            "kind": f"{LATER} {step}" if kind == LATER else kind,
            "turn": self.turn,
            "gradients": {key: copied(p.grad) for key, _, p in listed if p.grad is not None},
            "names": {key: name for key, name, _ in listed},
            "world": world,
            "weights": {k: sampled(p) for k, _, p in listed if not hasattr(p, "full_tensor")},
            "rates": [float(rate) for rate in rates],
            "seen": [] if kind == LATER else self.premises.seen,
            "sharded": len(plain) < len(listed),
            "unlike": self.unlike(at),
        }
        write(self.part.path(f"step.{rank}.{self.turn}.pt"), facts | self._so_far())
        if kind != LATER:
            self.premises.seen = []  # the next optimizer's step is of what comes now
        self._kept = [(p, p.detach().clone()) for _, _, p in listed if self.count < len(self.plan)]

    def _so_far(self) -> dict[str, Any]:
        """What is known of this step besides its optimizer."""
        return {
            "backwards": self.backwards,
            "cleared": self.cleared,
            "clips": self.fixed.clips,
            "norms": self.fixed.norms[:],
            "batch_norm": self.fixed.batch_norm,
            "replaced": list(self.fixed.replaced),
            "untrained": dict(self._untrained),
            "half": self.half,
            "filled": self.filled,
            "unjoined": sorted(set(self.unjoined)),
            "numbers": sorted(set(self.numbers)),
            "delivered": self.delivered[:],
            "doubts": self.doubts[:],
            "scales": sorted(self.scales),
            "foreign": [name for one in self.handed.of for name in one.foreign]
            if self.handed
            else [],
        }

    def _kind_of(self, optimizer: int) -> str:
        """What the step of an optimizer is; it takes one of each kind."""
        kind = self.now if optimizer == 0 or self.part.turns > 1 else LATER
        if (optimizer, kind) in self._kinds:
            return LATER
        self._kinds.add((optimizer, kind))
        return kind

    def _start_again_with_turns(self) -> None:
        """Leave if several optimizers have taken two equal rounds: only the first had a plan."""
        turns, odd = divmod(len(self._order), 2)
        unknown = self.part.turns == 1 and not self.part.one and len(self._taken) > 1
        if unknown and not odd and self._order[:turns] == self._order[turns:]:
            if rank_and_world()[0] == 0:
                self.part.path(TURNS).write_text(str(turns))
            leave()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._nested -= 1
        if self._nested or id(optimizer) not in self._taken:
            return
        self.updating = False
        with torch.no_grad():
            for parameter, value in self._kept:
                parameter.copy_(value)
                self._used.append(parameter)
            for (_, name), (owner, buffer, value) in self._buffers.items() if self._kept else ():
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)  # its first forward gave it its size
                buffer.copy_(value)
                owner._buffers[name] = buffer  # the script may have assigned another
        for owner, numbers in self._counters.values() if self._kept else ():
            vars(owner).update(numbers)
        self._buffers.clear()
        self._counters.clear()
        if self.combines and not self.part.path(COMBINES).exists():
            self.part.path(COMBINES).touch()
        self._taken[id(optimizer)] += 1
        self.turn += 1
        self._start_again_with_turns()
        alone = self.part.turns == 1 and id(optimizer) == next(iter(self._taken))
        if alone or (self.part.turns > 1 and self.turn % self.part.turns == 0):
            self._end_of_step()
        watched = self._comparable and not self.part.one
        if self.turn >= WATCHED * len(self._taken) or (
            self.count == len(self.plan) and not watched
        ):
            _, world = rank_and_world()
            ranks = range(1 if self.part.one else world)
            wait_for([self.part.path(f"step.{r}.{self.turn - 1}.pt") for r in ranks])
            leave()

    def _end_of_step(self) -> None:
        self.count += 1
        self.backwards = 0
        self.fixed.norms.clear()
        self.delivered.clear()
        self.doubts.clear()
        self.scales.clear()
        self._untrained.clear()
        for end in self.ends:
            end()
        rank, world = rank_and_world()
        if self.handed is None:
            self.part.path("world").write_text(str(world))
            self.recorded.without_evaluation()
            self.recorded.save(self.part.path(f"samples.{rank}.pt"))
            self.handed = _of_all(self.part, world, rank)
            if self.handed is None:
                said = f"TimeoutError: another rank took no first step within {PATIENCE:g} s"
                sys.stderr.write(f"{said}\n")
                leave(1)
            self.handed.shards = not self._comparable
            self._note_calls()
        self.fixed.as_it_is = self.now in (USUAL, LATER)


def _of_all(part: Part, world: int, rank: int = 0) -> Handed | None:
    """All ranks' samples, once they have written them; None if they do not."""
    if part.one:
        world = len(list(part.of_ranks("").glob("samples.*.pt")))
    paths = [part.of_ranks(f"samples.{r}.pt") for r in range(world)]
    if not paths or not wait_for(paths):
        return None
    return Handed(part, rank, [Recorded(**read(path)) for path in paths])


def _clear(parameter: Tensor) -> None:
    """Leave no gradient; one that is a view of a buffer of the script's stays there and is zero."""
    grad = parameter.grad
    plain = type(grad) is Tensor and grad.layout == torch.strided
    part = plain and (grad._is_view() or grad.untyped_storage().nbytes() > grad.nbytes)
    if grad is not None and part:
        grad.detach().zero_()
    else:
        parameter.grad = None


@torch.no_grad()
def filled(parameter: Tensor, key: str) -> bool:
    """Give a weight that is all zero small values, the same in all processes; whether it was."""
    full = whole(parameter)
    if not full.is_floating_point() or not full.numel() or bool(full.any()):
        return False
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    values = TINY * torch.randn(full.shape, generator=generator, device="cpu")
    values = values.to(parameter.device, parameter.dtype)
    if hasattr(parameter, "full_tensor"):
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    parameter.data.copy_(values)
    return True


def _waves(length: int) -> Tensor:
    return torch.arange(1, length + 1, device="cpu").cos().double()


def whole(tensor: Tensor) -> Tensor:
    """A plain copy of a tensor; of a sharded one, all of it (a collective)."""
    full = getattr(tensor, "full_tensor", None)
    plain = (full() if full else tensor).detach()
    return (plain.to_dense() if plain.is_sparse else plain).clone().cpu()


def sampled(tensor: Tensor) -> Tensor:
    """At most 512 elements of a gradient or weight; NaN and infinity become numbers."""
    pieces = hasattr(tensor, "full_tensor") or tensor.is_sparse
    flat = (whole(tensor) if pieces else tensor.detach()).flatten()
    return flat[:: max(1, len(flat) // 256)].clone().cpu().nan_to_num()


def leave(code: int = 0) -> None:
    """End this process: all is measured, and nothing that the script still does is wanted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
