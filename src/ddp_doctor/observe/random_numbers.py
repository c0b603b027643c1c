"""The state of the random number generator: a hash of it, never a draw."""

from typing import Any

import torch
from torch.nn import functional as F

from ddp_doctor.facts.fingerprints import checksum
from ddp_doctor.observe.patching import Args, Kwargs, Patches
from ddp_doctor.observe.recorder import Recorder


def note_state(recorder: Recorder) -> None:
    """Write into the open window which state the forward starts from."""
    if len(recorder.window["random"]) < 8:
        recorder.window["random"].append(_state())


def _state() -> int:
    """A checksum of all generators' states. Not yet run on a GPU."""
    state = checksum(torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state ^= checksum(torch.cuda.get_rng_state())
    return state


def install(recorder: Recorder, patches: Patches) -> None:
    def dropped(token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        if not recorder.on:
            return
        probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", True)
        if training and probability > 0:
            recorder.window["dropout"] += 1
            note_state(recorder)

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        patches.observe(F, name, after=dropped)
