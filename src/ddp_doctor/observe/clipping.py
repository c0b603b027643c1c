"""Gradient clipping: when it runs, over which gradients, and the norm that it finds."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ddp_doctor.facts.places import place
from ddp_doctor.facts.types import ClipFact
from ddp_doctor.observe.patching import Patches
from ddp_doctor.observe.recorder import Recorder


def install(recorder: Recorder, patches: Patches) -> None:
    before = partial(_before, recorder)
    for owner in (clip_grad, torch.nn.utils):
        for name, kind in (("clip_grad_norm_", "norm"), ("clip_grad_value_", "value")):
            patches.observe(owner, name, before, partial(_clipped, recorder, kind))
        patches.observe(owner, "get_total_norm", after=partial(_clipped, recorder, "total"))


def _before(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
    recorder: Recorder,
    kind: str,
    token: Any,
    result: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if not recorder.on or len(recorder.window["clips"]) >= 64:
        return
    limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
    sharded = hasattr(result, "placements")
    known = isinstance(result, Tensor) and not sharded
    fact = ClipFact(
        kind="norm" if kind == "total" else kind,
        norm=float(result.detach()) if known else None,
        limit=float(limit) if isinstance(limit, int | float) and kind != "total" else None,
        sharded=sharded,
        scale=recorder.scale_of_gradients(),
        backwards=recorder.so_far(),
        collectives=len(recorder.window["collectives"]),
        place=place(),
    )
    recorder.window["clips"].append(fact)
