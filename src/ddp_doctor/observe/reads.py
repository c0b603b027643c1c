"""Losses that the script reads as numbers, to print or to log them."""

import sys
from typing import Any

import torch

from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.patching import Patches
from ddp_doctor.places import place

MAX_READS = 16


def install(recorder: Recorder, patches: Patches) -> None:
    session = recorder.session

    def when() -> bool:
        return recorder.on and not session.over

    def read(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0]
        if not isinstance(result, float) or not tensor.is_floating_point() or recorder.in_step:
            return
        reads = recorder.window.setdefault("reads", [])
        at = place(sys._getframe(1))
        if at and len(reads) < MAX_READS:
            reads.append([result, at])

    for name in ("item", "__float__"):
        patches.observe(torch.Tensor, name, after=read, when=when)
