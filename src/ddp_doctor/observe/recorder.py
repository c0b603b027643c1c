"""The record of the current optimizer step of this process, filled by the observers.

A *window* is what happens from the end of one optimizer's step to the end of the next one's. It
holds the backward passes that reached the optimizer's parameters, the loss terms in them, and the
gradients that the optimizer saw. Observed windows are written to the journal, at most
`MAX_WINDOWS` of them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ddp_doctor.facts.containers import transforming
from ddp_doctor.facts.fingerprints import checksum, dense, piece_of, projection
from ddp_doctor.facts.types import (
    CollectiveFact,
    GroupFact,
    OptimizerFact,
    ParametersFact,
    ReplicaFact,
    SettingsFact,
    StartFact,
    TotalsFact,
    WindowFact,
    no_snapshot,
    nothing_yet,
)
from ddp_doctor.observe.models import Names
from ddp_doctor.observe.session import Session
from ddp_doctor.observe.states import Backward, OptimizerState, WrapperState, as_facts

MAX_WINDOWS = 80
MAX_PARAMETERS = 400
MAX_STARTS = 2000  # steps
MAX_CHANGES = 400  # of an optimizer's hyperparameters
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
REDUCED = "ddp_doctor.reduced"  # where a node of the graph keeps its number in `reduced_losses`


class Recorder:
    """State of one process: its optimizers, wrappers, and the window that is open."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.begin()

    def begin(self) -> None:
        """Nothing has been seen yet in this process."""
        self.names = Names()
        self.optimizers: dict[int, OptimizerState] = {}
        self.starts: dict[int, Tensor] = {}  # the checksums of `_note_start`, by step
        self.wrappers: list[WrapperState] = []
        self.written = 0
        self.backward_count = 0
        self.in_backward = 0
        self.in_step: list[int] = []
        self.made = 0
        self.local: dict[int, Tensor] = {}
        self.by_fsdp: set[int] = set()  # parameters whose whole local gradient fully_shard has had
        self.waiting: dict[int, Tensor] = {}  # of a whole gradient that fully_shard has not reduced
        self.used: dict[int, Tensor | None] = {}  # gradients right after the step that used them
        self.leftover: set[int] = set()  # parameters that still held these when backward came
        self.collective_count = 0
        self.scales = 1.0
        self.grouped = False
        self.terms_made = 0
        self.losses_made = 0
        self.hooks: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self.window = nothing_yet()
        self.terms: list[dict[str, Any]] = []
        self.reduced_losses: dict[int, CollectiveFact] = {}  # their collectives, by number

    def open(self) -> None:
        """Open the journal, and write down the process group, however it came about.

        Scripts that imported `init_process_group` by name before the doctor started call the
        original.
        """
        self.session.open()
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        if there and not self.grouped:
            rank = torch.distributed.get_rank()
            self.session.write("group", **GroupFact(rank=rank, world=ranks()))
        self.grouped = there

    @property
    def on(self) -> bool:
        return self.session.observing and not transforming()

    def wrapper_of(self, module: Any) -> WrapperState | None:
        return next((wrapper for wrapper in self.wrappers if wrapper.module() is module), None)

    def known_parameters(self) -> dict[int, Tensor]:
        """The parameters of all optimizers and wrappers, by id."""
        listed = [p for state in list(self.optimizers.values()) for p in state.parameters()]
        for wrapper in self.wrappers:
            module = wrapper.module()
            listed += [] if module is None else module.parameters()
        return {id(each): each for each in listed if isinstance(each, Tensor)}

    def add_optimizer(self, optimizer: Any) -> OptimizerState:
        state = self.optimizers.get(id(optimizer))
        if state is None or state.optimizer() is not optimizer:
            state = OptimizerState(optimizer, self.made)
            self.made += 1
            self.optimizers[id(optimizer)] = state
            remembers = any(g.get("momentum") or "betas" in g for g in optimizer.param_groups)
            fact = OptimizerFact(type=type(optimizer).__name__, momentum=remembers)
            self.session.write("optimizer", **fact)
        return state

    def parameters_of(self, state: OptimizerState) -> list[tuple[str, Tensor]]:
        listed = state.parameters()
        named = self.names.of(listed, self.wrappers)
        return list(zip(named, listed, strict=True))[:MAX_PARAMETERS]

    def take_snapshot(self, state: OptimizerState) -> None:
        """Write down what is in `.grad` now.

        Only the first call in each optimizer step is kept: the one before unscaling or clipping.
        `before_own_reduction` discards it, and the next call replaces it.
        """
        if state.snapshot is not None or not self.on:
            return
        snapshot = no_snapshot()
        if state.scale is not None:
            snapshot["unscaled"] = state.scale
        state.snapshot = snapshot
        for name, parameter in self.parameters_of(state):
            if parameter.grad is None:
                if parameter.requires_grad:
                    snapshot["missing"].append(name)
                continue
            snapshot["grads"][name] = _numbers(projection(parameter.grad))
            snapshot["hashes"][name] = checksum(parameter.grad)
            if id(parameter) in self.by_fsdp and (piece := piece_of(parameter)) is not None:
                snapshot["pieces"][name] = piece[1]
            local = _numbers(self.local.get(id(parameter)))
            snapshot["local"][name] = None if math.isnan(sum(local or ())) else local

    def before_own_reduction(self, optimizer: int | None, name: str = "") -> None:
        """The script is about to combine gradients: one by name, or all of one optimizer, or None
        for all.

        A snapshot that was taken before, by `unscale_` or a clip, is of local gradients.
        """
        for state in self.optimizers.values():
            if optimizer in (None, state.index):
                state.snapshot = None
                state.reduced |= (
                    {name} if name else {parameter for parameter, _ in self.parameters_of(state)}
                )

    def combined_in_step(self, at: str) -> None:
        """An optimizer combines gradients itself: what it was given is no gradient of all ranks."""
        self.window["combined_in_step"] = at
        for state in self.optimizers.values():
            if state.optimizer() is not None and id(state.optimizer()) in self.in_step:
                state.snapshot = None

    def mark_reduced_loss(self, node: Any, fact: CollectiveFact) -> None:
        """A loss goes through a collective: whether a later backward needs it will be seen there.

        The mark is on the graph, which nothing here keeps alive.
        """
        fact["needed"] = False
        self.losses_made += 1
        self.reduced_losses[self.losses_made] = fact
        node.metadata[REDUCED] = self.losses_made

    def holds_local_gradients(self, state: OptimizerState) -> bool:
        """Whether there is a gradient that the script has not combined itself."""
        return any(
            parameter.grad is not None and name not in state.reduced
            for name, parameter in self.parameters_of(state)
        )

    def so_far(self) -> dict[str, int]:
        """Per optimizer: the backwards since its last step that reached its parameters."""
        return {str(state.index): len(state.pending) for state in self.optimizers.values()}

    def note_gradients(self, state: OptimizerState) -> None:
        """What backward left in `.grad`: whatever differs at the update, the script changed."""
        state.left = {
            name: _numbers(projection(parameter.grad))
            for name, parameter in self.parameters_of(state)
            if parameter.grad is not None
        }

    def _note_start(self, state: OptimizerState) -> None:
        """A checksum of a few parameters' bits at every step, left on their device.

        Equal replicas have the same. The tensors have different weights, so that gradients that
        two of them have exchanged do not cancel.
        """
        if state.index or len(self.starts) >= MAX_STARTS:
            return
        listed = [p for p in state.parameters() if not hasattr(p, "placements")]
        with torch.no_grad():
            sums = [
                p.detach().reshape(-1)[:1024].view(BITS[p.element_size()]).sum(dtype=torch.int64)
                for p in listed[:: len(listed) // 8 + 1]
                if p.layout == torch.strided and p.device.type != "meta" and not p.is_complex()
                if p.device == listed[0].device  # a model may lie on several
            ]
            if sums:
                weights = torch.arange(1, len(sums) + 1, device=sums[0].device)
                self.starts[self.session.step_count] = (torch.stack(sums) * weights).sum()

    def before_update(self, state: OptimizerState) -> None:
        """The optimizer is about to change its parameters."""
        self._note_start(state)
        if not self.on:
            return
        self.take_snapshot(state)
        if held := {id(p) for p in state.parameters()} & self.waiting.keys():
            self.window["waiting"] = len(held)
        if "start" not in state.done:
            state.done.add("start")
            self.session.write("start", **self._held(state))

    def after_update(self, state: OptimizerState) -> None:
        """The optimizer has stepped: close the window."""
        state.steps += 1
        self._note_settings(state)
        self.end_window(state, skipped=False)

    def _note_settings(self, state: OptimizerState) -> None:
        """At every step: the numbers that it steps with, and which parameters train.

        Changes of the numbers are written down. Once other parameters train, the next steps are
        observed. Cost: a few microseconds, and some more for thousands of parameters.
        """
        optimizer = state.optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        numbers = [
            {name: value for name, value in group.items() if isinstance(value, int | float)}
            for group in groups
        ]
        if numbers != state.numbers and state.changes < MAX_CHANGES:
            state.numbers = numbers
            state.changes += 1
            step = self.session.step_count
            full = state.changes == MAX_CHANGES
            fact = SettingsFact(n=step, optimizer=state.index, groups=numbers, full=full)
            self.session.write("settings", **fact)
        trained = [parameter.requires_grad for parameter in state.parameters()]
        if state.trained and trained != state.trained:
            self.session.look_again()
        state.trained = trained

    def end_window(self, state: OptimizerState, skipped: bool) -> None:
        """Write the window down if it was observed, and begin the next one."""
        session = self.session
        if session.journal is not None:
            session.journal.steps += 1
        if self.on and self.written < MAX_WINDOWS:
            self.written += 1
            fact = WindowFact(
                n=session.step_count,
                optimizer=state.index,
                skipped=skipped,
                backwards=as_facts(state.pending),
                cleared=state.cleared,
                leftover=state.leftover,
                snapshot=state.snapshot or no_snapshot(),
                left=state.left,
                after=self.replica(state),
                outside=self._outside(),
                changed=[change for wrapper in self.wrappers for change in wrapper.changes()],
                gone=[wrapper.index for wrapper in self.wrappers if wrapper.wrapper() is None],
                cut=state.cut,
                batch_norms=self.names.batch_norms(self.wrappers),
                world=ranks(),
                sharded=any(hasattr(p, "placements") for p in state.parameters()),
                **self.window,
            )
            session.write("window", **fact)
            self.waiting.clear()
            for parameter in state.parameters():
                if hasattr(parameter, "placements"):  # nothing sees what its gradient is added to
                    self.local.pop(id(parameter), None)
        for record in state.pending:
            record["used"] = True
        state.forget()
        state.cleared = 0
        # Optimizers that step no longer do not count. Not asked of the garbage collector, which
        # would answer differently on each rank.
        state.last = session.step_count
        ever = [state for state in self.optimizers.values() if state.steps]
        turn = [state for state in ever if state.last > session.step_count - 2 * len(ever)]
        session.next_step(len(turn), full=self.written >= MAX_WINDOWS)
        self._clear()
        session.set_status("between steps")

    def _outside(self) -> int:
        """How many parameters got gradients and are in no optimizer of this process."""
        optimized = {id(p) for state in self.optimizers.values() for p in state.parameters()}
        everything = {key for record in self.all_backwards() for key in record.get("reached", ())}
        for record in self.all_backwards():  # one record may be pending for several optimizers
            record.pop("reached", None)
        return len(everything - optimized)

    def all_backwards(self) -> list[Backward]:
        return [record for state in self.optimizers.values() for record in state.pending]

    def replica(self, state: OptimizerState) -> ReplicaFact:
        """Hashes of the optimizer's parameters and of the buffers of their module."""
        buffers = self.names.buffers(self.wrappers)[:200]
        its = {name: checksum(buffer) for name, buffer in buffers}
        return {**_as_fact(self.parameters_of(state)), "buffers": its}

    def _held(self, state: OptimizerState) -> StartFact:
        """The optimizer's parameters: which shard each is, and which are constants."""
        shards: dict[str, list[int]] = {}
        constant = []
        parameters = self.parameters_of(state)
        for name, parameter in parameters:
            if hasattr(parameter, "placements"):
                split = [d for d, p in enumerate(parameter.placements) if not p.is_replicate()]
                coordinate = parameter.device_mesh.get_coordinate()
                shards[name] = [coordinate[d] for d in split] if coordinate else []
            data = dense(parameter)
            if data is not None and (data.numel() < 2 or bool((data == data.flatten()[0]).all())):
                constant.append(name)
        return {**_as_fact(parameters), "shards": shards, "constant": constant}

    def finish(self) -> None:
        """The process ends: write down what is only known then."""
        totals = TotalsFact(
            steps={str(s.index): s.steps for s in self.optimizers.values()},
            starts={str(step): int(value) for step, value in self.starts.items()},
        )
        self.session.write("totals", **totals)


def ranks() -> int:
    """The size of the default process group; 1 without one."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def _as_fact(parameters: list[tuple[str, Tensor]]) -> ParametersFact:
    return {
        "parameters": {name: checksum(parameter) for name, parameter in parameters},
        "values": {name: (_numbers(projection(one)) or [0.0])[0] for name, one in parameters},
    }


def _numbers(value: Tensor | None) -> list[float] | None:
    """A projection, as it is written down."""
    return None if value is None else [float(f"{number:.9g}") for number in value.tolist()]
