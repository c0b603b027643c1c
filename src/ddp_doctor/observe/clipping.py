"""Gradient clipping: when it runs, over which gradients, and the norm that it finds."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.patching import Patches
from ddp_doctor.places import place


def install(recorder: Recorder, patches: Patches) -> None:
    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not recorder.on:
            return
        parameters = args[0] if args else kwargs.get("parameters")
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        listed = isinstance(parameters, list | tuple)  # looking would use up a generator
        ids = {id(parameter) for parameter in parameters} if listed else set()
        for state in recorder.optimizers.values():
            held = {id(parameter) for parameter in state.parameters() if state.pending}
            # Without a list, what backward left is compared with what the optimizer sees. That does
            # not show a clip after an all-reduce of one's own.
            if ids & held or (held and not listed and state.reduced):
                recorder.take_snapshot(state)

    def clip(kind: str) -> Any:
        def after(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not recorder.on or len(recorder.window["clips"]) >= 64:
                return
            limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
            limit = None if kind == "total" else limit
            norm = None
            sharded = False
            if isinstance(result, Tensor):
                sharded = hasattr(result, "placements")
                norm = None if sharded else float(result.detach())
            recorder.window["clips"].append(
                {
                    "kind": "norm" if kind == "total" else kind,
                    "norm": norm,
                    "limit": float(limit) if isinstance(limit, int | float) else None,
                    "sharded": sharded,
                    "backwards": recorder.so_far(),
                    "collectives": len(recorder.window["collectives"]),
                    "place": place(),
                }
            )

        return after

    for owner in (clip_grad, torch.nn.utils):
        patches.observe(owner, "clip_grad_norm_", before, clip("norm"))
        patches.observe(owner, "clip_grad_value_", before, clip("value"))
        patches.observe(owner, "get_total_norm", after=clip("total"))
