"""The instructor's half of a check, in a process of its own in which no student's code ever runs.

Two calls, each in a fresh process: `draw` makes the inputs, `answer` says what has to come out of
them, what comes out of known mistakes, and what the check objects to in what passed between the
ranks. Here, and not with the trusted side, because torch is loaded here already.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grader.inside.wire import Channel


class Missed(Exception):  # noqa: N818 (what an author of checks writes: raise Missed("…"))
    """A judge's objection, in a sentence for the student."""


def run_oracle(channel: Channel, job: dict[str, Any], execute, plain) -> None:
    """Do one job of the trusted side and send the answer. `execute` and `plain` are a rank's."""
    check = types.ModuleType("check")
    check.Missed = Missed
    check.opened = opened
    failure = execute(job["check"], "<check>", check.__dict__)
    if failure is None:
        try:
            value = plain(_draw(check, job) if job["call"] == "draw" else _answer(check, job))
        except Exception as error:
            failure = {"type": type(error).__name__, "message": str(error)}
    if failure:
        channel.send({"kind": "raised", **failure})
    else:
        channel.send({"kind": "returned", "value": value})


def opened(gates: dict[str, float]) -> Callable[[Tensor, str], Tensor]:
    """What `gate` is on a rank, for code that knows the numbers behind the gates."""

    def gate(tensor: Tensor, name: str) -> Tensor:
        return _Scaled.apply(tensor, gates[name])

    return gate


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.factor, None


def _draw(check: types.ModuleType, job: dict[str, Any]) -> list[dict[str, Any]]:
    inputs = check.draw(np.random.default_rng(job["seed"]))
    if not isinstance(inputs, list) or not inputs or not all(isinstance(i, dict) for i in inputs):
        raise TypeError("draw has to return a list of dictionaries, one a rank")
    return inputs


def _answer(check: types.ModuleType, job: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for name in ("expected", "mistakes"):
        if hasattr(check, name):
            answer[name] = getattr(check, name)(job["inputs"])
    if hasattr(check, "judge"):
        # What ranks returned may be anything, and the numbers may be wrong already: a judge that
        # stumbles over it is reported, and matters only if the numbers are right.
        try:
            check.judge(_seen(job["seen"]), job["results"], job["inputs"])
        except Missed as objection:
            answer["objection"] = str(objection)
        except Exception as error:
            answer["stumbled"] = f"judge: {type(error).__name__}: {error}"
    return answer


def _seen(plain: dict[str, Any]) -> types.SimpleNamespace:
    """What the trusted side saw, with attributes again: see `grader.router.Seen`."""
    launches = [[types.SimpleNamespace(**one) for one in rank] for rank in plain["launches"]]
    return types.SimpleNamespace(**{**plain, "launches": launches})
