"""The instructor's half of a check, in a process of its own in which no student's code ever runs.

Two calls: `draw` makes the inputs, the right results, and the results of known mistakes. `judge`
says what the check objects to in what passed between the ranks. They run here, and not on the
trusted side, because torch is loaded here already. Each call executes the check's cell again; one
process answers many calls.
"""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grader.inside.wire import Channel


class Missed(Exception):  # noqa: N818 (what an author of checks writes: raise Missed("…"))
    """A judge's objection, in a sentence for the student."""


def run_oracle(channel: Channel, execute, plain) -> None:
    """Answer calls until the connection is closed. `execute` and `plain` are a rank's."""
    while (job := channel.receive()) is not None:
        check = types.ModuleType("check")
        check.Missed = Missed
        check.opened = opened
        failure = execute(job["check"], "<check>", check.__dict__)
        if failure is None:
            try:
                value = plain(_CALLS[job["call"]](check, job))
                channel.send({"kind": "returned", "value": value})
                continue
            except Exception as error:
                failure = {"type": type(error).__name__, "message": str(error)[:1000]}
        channel.send({"kind": "raised", **failure})


def opened(gates: dict[str, Any]) -> Callable[[Tensor, str], Tensor]:
    """What `gate` is on a rank, for code that knows the numbers behind the gates."""

    def gate(tensor: Tensor, name: str) -> Tensor:
        factor = gates[name]
        return _Scaled.apply(tensor, factor if np.isscalar(factor) else torch.as_tensor(factor))

    return gate


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.factor, None


def _draw(check: types.ModuleType, job: dict[str, Any]) -> dict[str, Any]:
    """The inputs, what has to come out of them, and what comes out of known mistakes."""
    inputs = check.draw(np.random.default_rng(job["seed"]))
    if not isinstance(inputs, list) or not inputs or not all(isinstance(i, dict) for i in inputs):
        raise TypeError("draw has to return a list of dictionaries, one per rank")
    answer: dict[str, Any] = {}
    for name in ("expected", "mistakes"):
        if hasattr(check, name):
            answer[name] = getattr(check, name)(inputs)
    return {"inputs": inputs, "answer": answer}


def _judge(check: types.ModuleType, job: dict[str, Any]) -> dict[str, Any]:
    """What the check objects to in what passed between the ranks."""
    try:
        check.judge(_seen(job["seen"]), job["results"], job["inputs"])
    except Missed as objection:
        return {"objection": str(objection)}
    return {}


_CALLS = {"draw": _draw, "judge": _judge}


def _seen(plain: dict[str, Any]) -> types.SimpleNamespace:
    """What the trusted side saw, with attributes again: see `grader.router.Seen`."""
    launches = [[types.SimpleNamespace(**one) for one in rank] for rank in plain["launches"]]
    return types.SimpleNamespace(**{**plain, "launches": launches})
