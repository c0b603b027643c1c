"""GradScaler: its scale, and the steps that it skips."""

from typing import Any

from ddp_doctor.facts.places import place
from ddp_doctor.facts.types import ScaleFact
from ddp_doctor.observe.patching import Patches
from ddp_doctor.observe.recorder import Recorder


def install(recorder: Recorder, patches: Patches) -> None:
    session = recorder.session

    def scaled(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if recorder.on and args[0].is_enabled():
            recorder.scales = float(args[0].get_scale())

    def unscale(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        state = recorder.optimizers.get(id(optimizer))
        if state is not None and recorder.on and args[0].is_enabled():
            recorder.take_snapshot(state)
            state.scale = float(args[0].get_scale())

    def before_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        state = recorder.optimizers.get(id(optimizer))
        return -1 if state is None else state.steps

    def after_step(before: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        state = recorder.optimizers.get(id(optimizer))
        if state is not None and before is not None and state.steps == before:
            recorder.window["step_place"] = place()
            recorder.end_window(state, skipped=True)

    def updated(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if recorder.on and args[0].is_enabled():
            scale = float(args[0].get_scale())
            session.write("scale", **ScaleFact(n=session.step_count, scale=scale, place=place()))

    from torch.amp import GradScaler

    observers: Any = {
        "scale": (None, scaled),
        "unscale_": (unscale, None),
        "update": (None, updated),
    }
    known: set[type] = set()

    def observe(kind: type) -> None:
        """Those methods that a class has itself: ShardedGradScaler's do not call GradScaler's."""
        known.add(kind)
        for name in observers.keys() & vars(kind).keys():
            patches.observe(kind, name, *observers[name])

    def made(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for kind in type(args[0]).__mro__:
            if issubclass(kind, GradScaler) and kind not in known:
                observe(kind)

    observe(GradScaler)
    patches.observe(GradScaler, "step", before_step, after_step)
    patches.observe(GradScaler, "__init__", made)
