"""The gradient that the optimizer receives, step by step, from the same weights.

Before the first step, weights that are all zero get small values, so that what is behind them has a
gradient. Before an update the gradients are written to a file. After it weights and buffers are put
back, and the next forward finds no gradients. After the first step the ranks wait for one another's
samples. Once the plan is done, ranks go on with ordinary steps and write down some sums of each
gradient and some elements of each weight.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_doctor.certificate.calls import Calls
from ddp_doctor.certificate.errors import OwnErrors, leave
from ddp_doctor.certificate.files import PATIENCE, read, samples_of, wait_for, write
from ddp_doctor.certificate.fixed import Fixed
from ddp_doctor.certificate.plan import (
    COMBINES,
    LATER,
    PLAN,
    PLAN_AHEAD,
    PLAN_USUAL,
    TURNS,
    TWICE,
    USUAL,
    WATCHED,
    WEIGHTS,
    WORLD,
    Part,
)
from ddp_doctor.certificate.premises import Premises
from ddp_doctor.certificate.record import Noted, Step, sampled, sums_of, waves_of, whole
from ddp_doctor.certificate.samples import FORWARD, Handed, Recorded, line_of
from ddp_doctor.certificate.state import State, filled, load
from ddp_doctor.facts.containers import transforming


class Steps:
    """Records and repeats. `count` is the number of rounds of the optimizers that have ended."""

    def __init__(self, part: Part, fixed: Fixed) -> None:
        self.part = part
        self.fixed = fixed
        self.errors = OwnErrors()
        self.recorded = Recorded()
        self.handed = _of_all(part, 0) if part.one else None
        self.premises = Premises()
        self.state = State()
        self.count = 0
        self.turn = 0  # steps of all optimizers
        self.optimizers: list[Optimizer] = []
        self.ends: list[Callable[[], None]] = [self.premises.clear]  # at the end of each step
        self.noted = Noted()
        self.combines = False  # whether an optimizer's step calls a collective
        self._updates = False
        # Whether an optimizer's step does not use the places of its first one.
        self.unlike: Callable[[int], bool] = lambda optimizer: False
        self.taken: dict[int, int] = {}  # id of an optimizer: its steps
        self.before_join: dict[int, int] = {}  # the same, when the last Join ended
        self._order: list[int] = []  # the optimizers that have stepped, each time
        self._planned: set[tuple[int, str]] = set()  # the optimizers' steps of the plan
        self._stepping: FrameType | None = None  # in which an optimizer steps now
        self._comparable = False  # whether the ranks' gradients are worth a look after the plan
        self._started = False
        self._names: dict[int, str] = {}
        self._keys: dict[int, str] = {}  # of the trained parameters, by their ids
        guard = self.errors.guard
        nn.modules.module.register_module_forward_pre_hook(guard(self._before_forward))
        self.calls = Calls(self)
        register_optimizer_step_pre_hook(guard(self._before))
        register_optimizer_step_post_hook(guard(self._after))

    # What the plan says.

    @property
    def plan(self) -> tuple[str, ...]:
        """What each step is; see the module of this name."""
        ahead = self.handed.records[0].ahead if self.handed else self.recorded.ahead
        usual = PLAN_USUAL if self.fixed.clips or self.fixed.batch_norm else PLAN
        plan = PLAN_AHEAD if ahead else usual
        return (*plan[:-1], TWICE, *plan[-1:]) if self.part.one else plan

    def kind(self, step: int) -> str:
        """What the samples of a step are."""
        return self.plan[step] if step < len(self.plan) else LATER

    @property
    def now(self) -> str:
        return self.kind(self.count)

    @property
    def only_evaluates(self) -> bool:
        """Whether what happens now is no part of a training step, as far as is known."""
        trains_only = self.handed is not None and self.handed.records[0].trains_only
        return trains_only and self.calls.evaluates

    # Before an optimizer steps.

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or not self.optimizers or transforming():
            return
        self.premises.in_layer(module, args)
        self.state.clear_gradients()
        if not self._started:
            self._started = True
            self._name(module)
            self._start_alike()

    def _name(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self._names.setdefault(id(parameter), name.removeprefix("module."))

    def _start_alike(self) -> None:
        """One process starts with rank 0's weights."""
        parameters = self._parameters()
        self.noted.filled = sum(filled(parameter, key) for parameter, key in parameters) > 0
        path = self.part.of_ranks(WEIGHTS)
        if not self.part.one:
            weights = {key: whole(parameter) for parameter, key in parameters}
            if rank_and_world()[0] == 0:
                write(path, weights)
        elif path.exists():
            load(read(path), parameters)

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Write down what a model that is trained is given, and the buffers of each module."""
        self._keys = {id(parameter): key for parameter, key in self._parameters()}
        self.state.note_untrained(module, self._keys)
        if not torch.is_grad_enabled():
            return
        self._before_forward(module, args)  # from the weights with which the forward starts
        self.state.keep_modules(module)
        trained = [p for p in module.parameters() if id(p) in self._keys]
        if trained:
            self._name(module)
            plain = [sampled(p).double() for p in trained if not hasattr(p, "full_tensor")]
            weights = sum(float(part @ waves_of(len(part))) for part in plain)
            self.premises.model(min(self._keys[id(p)] for p in trained), (args, kwargs), weights)

    def after_call(self, module: nn.Module, result: Any) -> None:
        """Write down what a model that is trained has computed."""
        if torch.is_grad_enabled() and any(id(p) in self._keys for p in module.parameters()):
            self.premises.computed(result)

    def note_reduced(self, numbers: Any) -> None:
        """The result of an all-reduce, unless it is a gradient."""
        if self.now != LATER and all(p.grad is not numbers for p, _ in self._parameters()):
            self.premises.reduced(numbers)

    def _parameters(self) -> list[tuple[Tensor, str]]:
        """All that is trained, with its keys."""
        listed = (each for optimizer in self.optimizers for each in self._listed(optimizer))
        return [(parameter, key) for key, _, parameter in listed]

    def is_trained(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with a weight or its gradient, or there are none yet."""
        parameters = [parameter for parameter, _ in self._parameters()]
        held = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        plain = [t for t in held if t.layout == torch.strided and not hasattr(t, "full_tensor")]
        start = tensor.untyped_storage().data_ptr()
        return not held or any(t.untyped_storage().data_ptr() == start for t in plain)

    def _listed(self, optimizer: Optimizer) -> list[tuple[str, str, Tensor]]:
        """(key, name, parameter). A key counts optimizers and parameters as they are made."""
        made = self.optimizers
        at = next((n for n, other in enumerate(made) if other is optimizer), len(made))
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        return [
            (f"{at}.{n}", self._names.get(id(p), f"parameter {n} of optimizer {at}"), p)
            for n, p in enumerate(listed)
        ]

    # An optimizer steps.

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._steps_now():
            return None  # called by an optimizer's step
        self._stepping = sys._getframe(2)  # until `_after`, or an error leaves it
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._updates = True
        if not callable(closure):
            self._record(optimizer)
            return None
        then_record = self._recording(optimizer, closure)
        if len(args) > 1:
            return (args[0], then_record, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_record}

    def _steps_now(self) -> bool:
        """Whether this is called by an optimizer's step. One that has raised is over."""
        frame: FrameType | None = sys._getframe(1)
        while self._stepping is not None and frame is not None:
            if frame is self._stepping:
                return True
            frame = frame.f_back
        self._stepping, self._updates = None, False
        return False

    @property
    def updating(self) -> bool:
        """Whether an optimizer computes its update now: of no samples."""
        return self._updates and self._steps_now()

    def _recording(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure, and a record when it was first called: later it sees other weights."""
        recorded = False

        def then_record() -> Any:
            nonlocal recorded
            self._updates = False
            loss = closure()
            self._updates = True
            if not recorded:
                self.errors.guard(self._record)(optimizer)
            recorded = True
            return loss

        return then_record

    def _record(self, optimizer: Optimizer) -> None:
        taken = self.taken.setdefault(id(optimizer), 0)
        rank, world = rank_and_world()
        at = list(self.taken).index(id(optimizer))
        kind = self._kind_of(at)
        listed = self._listed(optimizer)
        gradients = {key: p.grad for key, _, p in listed if p.grad is not None}
        plain = [p for _, _, p in listed if not hasattr(p, "full_tensor")]
        self._comparable = world > 1 and len(plain) == len(listed)
        of_join = f"{self.calls.joins}.{taken - self.before_join.get(id(optimizer), 0)}"
        step = Step(
            rank=rank,
            world=world,
            optimizer=at,
            kind=f"{LATER} {of_join}" if kind == LATER else kind,
            turn=self.turn,
            names={key: name for key, name, p in listed if p.requires_grad},
            weights={k: sampled(p) for k, _, p in listed if not hasattr(p, "full_tensor")},
            sums={key: sums_of(gradient) for key, gradient in gradients.items()},
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            seen=[] if kind == LATER else self.premises.seen,
            sharded=len(plain) < len(listed),
            unlike=self.unlike(at),
            **self._so_far(),
        )
        step.write(self.part, gradients if kind != LATER and rank == 0 else None)
        for gradient in gradients.values() if kind != LATER and rank > 0 else ():
            whole(gradient)  # rank 0 needs all shards
        if self.count < len(self.plan):
            self.state.keep_weights(p for _, _, p in listed)

    def _so_far(self) -> dict[str, Any]:
        """What is known of this step besides its optimizer."""
        noted, fixed, handed = self.noted, self.fixed, self.handed
        noted.clips, noted.norms, noted.batch_norm = fixed.clips, fixed.norms, fixed.batch_norm
        noted.replaced, noted.untrained = fixed.replaced, self.state.untrained
        noted.unjoined = sorted(set(noted.unjoined))
        if handed is not None:
            noted.marked = handed.marked or handed.loaded
            noted.foreign = [name for record in handed.records for name in record.foreign]
            mixed = {place for place, _ in handed.mixed if place[-1] == FORWARD}
            noted.numbers = [] if handed.marked else sorted(map(line_of, mixed))
        return vars(noted)

    def _kind_of(self, optimizer: int) -> str:
        """What the step of an optimizer is; it takes one of each kind."""
        kind = self.now if optimizer == 0 or self.part.turns > 1 else LATER
        return LATER if (optimizer, kind) in self._planned else kind

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self.taken or self._stepping is not sys._getframe(2):
            return
        self._stepping, self._updates = None, False
        at = list(self.taken).index(id(optimizer))
        kind = self._kind_of(at)
        self._planned.add((at, kind))
        self._order.append(at)
        if kind != LATER:
            self.premises.seen = []  # the next optimizer's step is of what comes now
        self.state.put_back()
        if self.combines:
            self.part.path(COMBINES).touch()
        self.taken[id(optimizer)] += 1
        self.turn += 1
        self._start_again_with_turns()
        alone = self.part.turns == 1 and id(optimizer) == next(iter(self.taken))
        if alone or (self.part.turns > 1 and self.turn % self.part.turns == 0):
            self._end_of_step()
        watched = self._comparable and not self.part.one
        enough = self.turn >= WATCHED * len(self.taken)
        if enough or (self.count == len(self.plan) and not watched):
            self._wait_for_the_others()
            self._leave()

    def _start_again_with_turns(self) -> None:
        """Leave if several optimizers have taken two equal rounds: only the first had a plan."""
        turns, odd = divmod(len(self._order), 2)
        unknown = self.part.turns == 1 and not self.part.one and len(self.taken) > 1
        if unknown and not odd and self._order[:turns] == self._order[turns:]:
            if rank_and_world()[0] == 0:
                self.part.path(TURNS).write_text(str(turns))
            self._leave()

    def _wait_for_the_others(self) -> None:
        """Those that share a collective with this rank's last step would fail if it left now."""
        world = 1 if self.part.one else rank_and_world()[1]
        paths = [self.part.path(f"step.{r}.{self.turn - 1}.pt") for r in range(world)]
        wait_for(paths, 1.0 if self.calls.may_join else PATIENCE)  # a rank may be out of inputs

    def _leave(self) -> None:
        self.part.leave(rank_and_world()[0])
        leave()

    def _end_of_step(self) -> None:
        self.count += 1
        self.noted = replace(self.noted, backwards=0, delivered=[], doubts=[], scales={})
        self.fixed.norms.clear()
        self.state.untrained.clear()
        for end in self.ends:
            end()
        if self.handed is None:
            self._hand_over()
        self.fixed.as_it_is = self.now in (USUAL, LATER)

    def _hand_over(self) -> None:
        """Write down this rank's samples, and wait for those of the others."""
        rank, world = rank_and_world()
        if rank == 0:
            self.part.path(WORLD).write_text(str(world))
        self.recorded.without_evaluation()
        self.recorded.save(self.part.path(samples_of(rank)))
        self.handed = _of_all(self.part, world, rank)
        if self.handed is None:
            text = f"TimeoutError: another rank took no first step within {PATIENCE:g} s"
            sys.stderr.write(f"{text}\n")
            leave(1)
        else:
            self.handed.shards = not self._comparable


def rank_and_world() -> tuple[int, int]:
    """Of the launcher if there is one, else of the process group; (0, 1) without either."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _of_all(part: Part, world: int, rank: int = 0) -> Handed | None:
    """All ranks' samples, once they have written them; None if they do not."""
    if part.one:
        world = len(list(part.of_ranks("").glob(samples_of("*"))))
    paths = [part.of_ranks(samples_of(r)) for r in range(world)]
    if not paths or not wait_for(paths):
        return None
    return Handed(part, rank, [Recorded(**read(path)) for path in paths])
