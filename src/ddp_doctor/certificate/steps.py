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
from ddp_doctor.certificate.errors import DoctorErrors, leave
from ddp_doctor.certificate.files import PATIENCE, read, samples_of, wait_for, write
from ddp_doctor.certificate.fixed import Replacements
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
from ddp_doctor.certificate.record import Step, elements_of, full_tensor, sums_of, waves_of
from ddp_doctor.certificate.samples import FORWARD, Dealer, Record, line_of
from ddp_doctor.certificate.state import State, fill, load
from ddp_doctor.facts.containers import transforming


class Steps:
    """Records and repeats. `count` is the number of rounds of the optimizers that have ended."""

    def __init__(self, part: Part, replacements: Replacements) -> None:
        self.part = part
        self.replacements = replacements
        self.notes = replacements.notes
        self.errors = DoctorErrors()
        self.record = Record()
        self.dealer = _dealer(part, 0) if part.is_one else None
        self.premises = Premises()
        self.state = State(self.notes)
        self.count = 0
        self.optimizers: list[Optimizer] = []
        self.ends: list[Callable[[], None]] = [self.premises.clear]  # at the end of each step
        # Whether an optimizer's step does not use the places of its first one.
        self.is_elsewhere: Callable[[int], bool] = lambda optimizer: False
        self.combines = False  # whether an optimizer's step calls a collective
        self.turn_of_join = 0  # steps of all optimizers before the last Join ended
        self._order: list[int] = []  # ids of the optimizers that have stepped, each time
        self._plan_steps: set[tuple[int, str]] = set()  # the optimizers' steps of the plan
        self._step_frame: FrameType | None = None  # in which an optimizer steps now
        self._updates = False
        self._is_recorded = False  # the step that an optimizer takes now
        self._compares_ranks = False  # whether their gradients are worth a look after the plan
        self._has_begun = False
        self._names: dict[int, str] = {}
        self._keys: dict[int, str] = {}  # of the trained parameters, by their ids
        guard = self.errors.guard
        nn.modules.module.register_module_forward_pre_hook(guard(self._before_forward))
        self.calls = Calls(self)
        register_optimizer_step_pre_hook(guard(self._before_step))
        register_optimizer_step_post_hook(guard(self._after_step))

    # What the plan says.

    @property
    def plan(self) -> tuple[str, ...]:
        """What each step is; see the module of this name."""
        record = self.dealer.records[0] if self.dealer else self.record
        usual = PLAN_USUAL if self.notes.clips or self.notes.batch_norm else PLAN
        plan = PLAN_AHEAD if record.fetches_ahead else usual
        return (*plan[:-1], TWICE, *plan[-1:]) if self.part.is_one else plan

    def kind(self, step: int) -> str:
        """What the samples of a step are."""
        return self.plan[step] if step < len(self.plan) else LATER

    @property
    def kind_now(self) -> str:
        return self.kind(self.count)

    @property
    def only_evaluates(self) -> bool:
        """Whether what happens now is no part of a training step, as far as is known."""
        trains_only = self.dealer is not None and self.dealer.records[0].trains_only
        return trains_only and self.calls.evaluates

    @property
    def turn(self) -> int:
        """Steps of all optimizers that have ended."""
        return len(self._order)

    def _number(self, optimizer: Optimizer) -> int:
        """Which optimizer it is, in the order of their first steps."""
        ids = list(dict.fromkeys([*self._order, id(optimizer)]))
        return ids.index(id(optimizer))

    # Before an optimizer steps.

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or not self.optimizers or transforming():
            return
        self.premises.note_layer(module, args)
        self.state.clear_gradients()
        if not self._has_begun:
            self._has_begun = True
            self._name_parameters(module)
            self._start_alike()

    def _name_parameters(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self._names.setdefault(id(parameter), name.removeprefix("module."))

    def _start_alike(self) -> None:
        """One process starts with rank 0's weights."""
        parameters = self._parameters()
        self.notes.fills_zeros = sum(fill(parameter, key) for parameter, key in parameters) > 0
        path = self.part.ranks_path(WEIGHTS)
        if not self.part.is_one:
            weights = {key: full_tensor(parameter) for parameter, key in parameters}
            if rank_and_world()[0] == 0:
                write(path, weights)
        elif path.exists():
            load(read(path), parameters)

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Write down what a model that is trained is given, and the buffers of each module."""
        self._keys = {id(parameter): key for parameter, key in self._parameters()}
        self._before_forward(module, args)
        self.state.note_untrained(module, self._keys)  # the weights with which the forward starts
        if not torch.is_grad_enabled():
            return
        self.state.keep_modules(module)
        trained = [p for p in module.parameters() if id(p) in self._keys]
        if trained:
            self._name_parameters(module)
            elements = [elements_of(p).double() for p in trained if not is_sharded(p)]
            weights = sum(float(part @ waves_of(len(part))) for part in elements)
            key = min(self._keys[id(p)] for p in trained)
            self.premises.note_model(key, (args, kwargs), weights)

    def after_call(self, module: nn.Module, result: Any) -> None:
        """Write down what a model that is trained has computed."""
        if torch.is_grad_enabled() and any(id(p) in self._keys for p in module.parameters()):
            self.premises.note_outputs(result)

    def note_reduction(self, numbers: Any) -> None:
        """The result of an all-reduce, unless it is a gradient."""
        if self.kind_now != LATER and all(p.grad is not numbers for p, _ in self._parameters()):
            self.premises.note_reduction(numbers)

    def _parameters(self) -> list[tuple[Tensor, str]]:
        """All that is trained, each with its key in the first optimizer that has it. That one may
        give parts to others, on each rank another part (ZeRO).
        """
        rows = (row for optimizer in self.optimizers for row in self._parameters_of(optimizer))
        first = {id(parameter): (parameter, key) for key, _, parameter in reversed([*rows])}
        return [*reversed(first.values())]

    def is_trained(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with a weight or its gradient, or there are none yet."""
        parameters = [parameter for parameter, _ in self._parameters()]
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        with_storage = [t for t in tensors if t.layout == torch.strided and not is_sharded(t)]
        start = tensor.untyped_storage().data_ptr()
        return not tensors or any(t.untyped_storage().data_ptr() == start for t in with_storage)

    def _parameters_of(self, optimizer: Optimizer) -> list[tuple[str, str, Tensor]]:
        """(key, name, parameter). A key counts optimizers and parameters as they are made."""
        ids = list(map(id, self.optimizers))
        at = ids.index(id(optimizer)) if id(optimizer) in ids else len(ids)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [
            (f"{at}.{n}", self._names.get(id(p), f"parameter {n} of optimizer {at}"), p)
            for n, p in enumerate(parameters)
        ]

    # An optimizer steps.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._in_step():
            return None  # called by an optimizer's step
        self._step_frame = sys._getframe(2)  # until `_after_step`, or an error leaves it
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._updates, self._is_recorded = True, False
        if not callable(closure):
            self._write(optimizer)
            return None
        then_record = self._recorder(optimizer, closure)
        if len(args) > 1:
            return (args[0], then_record, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_record}

    def _in_step(self) -> bool:
        """Whether this is called by an optimizer's step. One that has raised is over."""
        frame: FrameType | None = sys._getframe(1)
        while self._step_frame is not None and frame is not None:
            if frame is self._step_frame:
                return True
            frame = frame.f_back
        self._step_frame, self._updates = None, False
        return False

    @property
    def updates(self) -> bool:
        """Whether an optimizer computes its update now: of no samples."""
        return self._updates and self._in_step()

    def _recorder(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure, and a record when it was first called: later it sees other weights."""

        def then_record() -> Any:
            self._updates = False
            loss = closure()
            self._updates = True
            if not self._is_recorded:
                self.errors.guard(self._write)(optimizer)
            return loss

        return then_record

    def _write(self, optimizer: Optimizer) -> None:
        self._is_recorded = True
        rank, world = rank_and_world()
        number = self._number(optimizer)
        kind = self._kind_of(number)
        rows = self._parameters_of(optimizer)
        gradients = {key: p.grad for key, _, p in rows if p.grad is not None}
        weights = {key: elements_of(p) for key, _, p in rows if not is_sharded(p)}
        self._compares_ranks = world > 1 and len(weights) == len(rows)
        since_join = self._order[self.turn_of_join :].count(id(optimizer))
        self._complete_notes()
        self.state.note_moved()
        step = Step(
            rank=rank,
            world=world,
            optimizer=number,
            kind=f"{LATER} {self.calls.joins}.{since_join}" if kind == LATER else kind,
            turn=self.turn,
            names={key: name for key, name, p in rows if p.requires_grad},
            weights=weights,
            sums={key: sums_of(gradient) for key, gradient in gradients.items()},
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            premises=[] if kind == LATER else self.premises.notes,
            has_shards=len(weights) < len(rows),
            is_elsewhere=self.is_elsewhere(number),
            **vars(self.notes),
        )
        step.write(self.part, gradients if kind != LATER and rank == 0 else None)
        for gradient in gradients.values() if kind != LATER and rank > 0 else ():
            full_tensor(gradient)  # rank 0 needs all shards
        if self.count < len(self.plan):
            self.state.keep_weights(p for _, _, p in rows)

    def _complete_notes(self) -> None:
        """Add what the samples of all ranks say of this step."""
        notes, dealer = self.notes, self.dealer
        notes.join_failures = sorted(set(notes.join_failures))
        if dealer is not None:
            notes.has_marks = dealer.is_marked or dealer.has_loader
            notes.foreign_classes = [name for r in dealer.records for name in r.foreign_classes]
            places = {p for p, _ in dealer.calls_with_other_numbers if p.function == FORWARD}
            notes.numbers = [] if dealer.is_marked else sorted(map(line_of, places))

    def _kind_of(self, optimizer: int) -> str:
        """What the step of an optimizer is; it takes one of each kind."""
        kind = self.kind_now if optimizer == 0 or self.part.turns > 1 else LATER
        return LATER if (optimizer, kind) in self._plan_steps else kind

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_recorded or self._step_frame is not sys._getframe(2):
            return
        self._step_frame, self._updates = None, False
        number = self._number(optimizer)
        kind = self._kind_of(number)
        self._plan_steps.add((number, kind))
        self._order.append(id(optimizer))
        if kind != LATER:
            self.premises.notes = []  # the next optimizer's step is of what comes now
        self.state.put_back()
        if self.combines:
            self.part.path(COMBINES).touch()
        self._start_again_with_turns()
        turns = self.part.turns
        if self.turn % turns == 0 if turns > 1 else number == 0:
            self._end_step()
        compares = self._compares_ranks and not self.part.is_one
        enough = self.turn >= WATCHED * len(set(self._order))
        if enough or (self.count == len(self.plan) and not compares):
            self._wait_for_the_others()
            self._leave()

    def _start_again_with_turns(self) -> None:
        """Leave if several optimizers have taken two equal rounds: only the first had a plan."""
        turns, odd = divmod(self.turn, 2)
        unknown = self.part.turns == 1 and not self.part.is_one and len(set(self._order)) > 1
        if unknown and not odd and self._order[:turns] == self._order[turns:]:
            if rank_and_world()[0] == 0:
                self.part.path(TURNS).write_text(str(turns))
            self._leave()

    def _wait_for_the_others(self) -> None:
        """Those that share a collective with this rank's last step would fail if it left now."""
        world = 1 if self.part.is_one else rank_and_world()[1]
        paths = [self.part.path(f"step.{r}.{self.turn - 1}.pt") for r in range(world)]
        wait_for(paths, 1.0 if self.calls.may_join else PATIENCE)  # a rank may be out of inputs

    def _leave(self) -> None:
        self.part.leave(rank_and_world()[0])
        leave()

    def _end_step(self) -> None:
        self.count += 1
        self.notes.begin_step()
        for end in self.ends:
            end()
        if self.dealer is None:
            self._share_samples()
        self.replacements.as_usual = self.kind_now in (USUAL, LATER)

    def _share_samples(self) -> None:
        """Write down this rank's samples, and wait for those of the others."""
        rank, world = rank_and_world()
        if rank == 0:
            self.part.path(WORLD).write_text(str(world))
        self.record.forget_evaluation()
        self.record.save(self.part.path(samples_of(rank)))
        self.dealer = _dealer(self.part, world, rank)
        if self.dealer is None:
            text = f"TimeoutError: another rank took no first step within {PATIENCE:g} s"
            sys.stderr.write(f"{text}\n")
            leave(1)
        else:
            self.dealer.shards = not self._compares_ranks


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def rank_and_world() -> tuple[int, int]:
    """Of the launcher if there is one, else of the process group; (0, 1) without either."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _dealer(part: Part, world: int, rank: int = 0) -> Dealer | None:
    """All ranks' samples, once they have written them; None if they do not."""
    if part.is_one:
        world = len(list(part.ranks_path("").glob(samples_of("*"))))
    paths = [part.ranks_path(samples_of(r)) for r in range(world)]
    if not paths or not wait_for(paths):
        return None
    return Dealer(part, rank, [Record(**read(path)) for path in paths])
