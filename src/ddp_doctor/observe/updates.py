"""What a script does between backward and the update: clips, scales of a GradScaler, schedulers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler

from ddp_doctor.facts.places import place
from ddp_doctor.facts.types import ClipFact, ScaleFact, ScheduleFact
from ddp_doctor.observe.patching import Args, Kwargs, Patches
from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.observe.states import Numbers, OptimizerState

DENSE = 200  # calls of a scheduler that are all written down; later ones ever more rarely


def install(recorder: Recorder, patches: Patches) -> None:
    before = partial(_before_clip, recorder)
    for owner in (clip_grad, torch.nn.utils):
        for name, kind in (("clip_grad_norm_", "norm"), ("clip_grad_value_", "value")):
            patches.observe(owner, name, before, partial(_clipped, recorder, kind))
        patches.observe(owner, "get_total_norm", after=partial(_clipped, recorder, "total"))
    _Scalers(recorder, patches)
    patches.observe(LRScheduler, "step", *_schedules(recorder))


def _before_clip(recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
    """Look at the gradients while they are what the ranks combined."""
    if not recorder.on:
        return
    parameters = args[0] if args else kwargs.get("parameters")
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    listed = isinstance(parameters, list | tuple)  # looking would use up a generator
    ids = set(map(id, parameters or ())) if listed else set()
    for state in recorder.optimizers.values():
        held = {id(parameter) for parameter in state.parameters() if state.pending}
        # Without a list, what backward left is compared with what the optimizer sees. That does
        # not show a clip after an all-reduce of one's own.
        if ids & held or (held and not listed and state.reduced):
            recorder.take_snapshot(state)


def _clipped(
    recorder: Recorder, kind: str, token: Any, result: Any, args: Args, kwargs: Kwargs
) -> None:
    if not recorder.on or len(recorder.window["clips"]) >= 64:
        return
    limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
    known = isinstance(result, Tensor) and not hasattr(result, "placements")
    fact = ClipFact(
        kind="norm" if kind == "total" else kind,
        norm=float(result.detach()) if known else None,
        limit=float(limit) if isinstance(limit, int | float) and kind != "total" else None,
        collectives=len(recorder.window["collectives"]),
        place=place(),
    )
    recorder.window["clips"].append(fact)


class _Scalers:
    """GradScaler: its scale, and the steps that it skips."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self.recorder, self.patches = recorder, patches
        self.known: set[type] = set()
        self.observe(GradScaler)
        patches.observe(GradScaler, "step", self.before_step, self.after_step)
        patches.observe(GradScaler, "__init__", self.made)

    def observe(self, kind: type) -> None:
        """Those methods that a class has itself: ShardedGradScaler's do not call GradScaler's."""
        self.known.add(kind)
        observers: dict[str, Any] = {
            "scale": (None, self.scaled),
            "unscale_": (self.unscale, None),
            "update": (None, self.updated),
        }
        for name in observers.keys() & vars(kind).keys():
            self.patches.observe(kind, name, *observers[name])

    def made(self, args: Args, kwargs: Kwargs) -> None:
        for kind in type(args[0]).__mro__:
            if issubclass(kind, GradScaler) and kind not in self.known:
                self.observe(kind)

    def scaled(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        if self.recorder.on and args[0].is_enabled():
            self.recorder.scales = float(args[0].get_scale())

    def unscale(self, args: Args, kwargs: Kwargs) -> None:
        state = self._optimizer(args, kwargs)
        if state is not None and self.recorder.on and args[0].is_enabled():
            self.recorder.take_snapshot(state)
            state.scale = float(args[0].get_scale())

    def updated(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        if self.recorder.on and args[0].is_enabled():
            session, scale = self.recorder.session, float(args[0].get_scale())
            session.write("scale", **ScaleFact(n=session.step_count, scale=scale, place=place()))

    def before_step(self, args: Args, kwargs: Kwargs) -> int:
        state = self._optimizer(args, kwargs)
        return -1 if state is None else state.steps

    def after_step(self, before: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        state = self._optimizer(args, kwargs)
        if state is not None and before is not None and state.steps == before:
            self.recorder.window["step_place"] = place()
            self.recorder.end_window(state, skipped=True)

    def _optimizer(self, args: Args, kwargs: Kwargs) -> OptimizerState | None:
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        return self.recorder.optimizers.get(id(optimizer))


def _schedules(recorder: Recorder) -> Any:
    """How often schedulers step, and the rates that they set."""
    session, schedulers = recorder.session, Numbers()
    counts: dict[int, int] = {}

    def before(args: Args, kwargs: Kwargs) -> bool:
        return hasattr(args[0], "_last_lr")  # the first step is the constructor's

    def after(counted: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        if not counted:
            return
        scheduler = args[0]
        number = schedulers.of(scheduler)
        count = counts[number] = counts.get(number, 0) + 1
        if count > DENSE and count % 10 ** (len(str(count)) - 2):
            return
        rates = scheduler.get_last_lr()
        fact = ScheduleFact(
            scheduler=number,
            count=count,
            steps=session.step_count,
            backwards=recorder.backward_count,
            total=getattr(scheduler, "T_max", getattr(scheduler, "total_steps", None)),
            rate=float(rates[0]) if rates else None,
            place=place(),
        )
        session.write("schedule", **fact)

    return before, after
