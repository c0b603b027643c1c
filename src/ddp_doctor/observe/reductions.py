"""The script's own reductions: which gradients go in, however they are packed, and what comes out.

Gradients may be sent one by one, one after the other in a flat tensor of which each rank gets a
piece back, or as a list. A gradient is in such a tensor where its elements are, up to one factor.
What it sends is compared with what backward computed when the step has ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_doctor.facts.fingerprints import dense, projection_of, sum_of_squares
from ddp_doctor.facts.places import place
from ddp_doctor.facts.types import ReducedFact
from ddp_doctor.observe.recorder import Recorder

ARGUMENTS = {
    "all_reduce": ("tensor",),
    "reduce": ("tensor",),
    "reduce_scatter_tensor": ("output", "input"),
    "reduce_scatter_single": ("output", "input"),
    "reduce_scatter": ("output", "input_list"),
}
FEW = 16  # elements: such a tensor is a statistic, unless it is a gradient
OFF = 0.02  # of a norm: what half precision may change


@dataclass
class Held:
    """A parameter's gradient."""

    name: str
    key: int
    flat: Tensor


@dataclass
class Sent:
    """The gradients in one call's tensor: each with its first element there."""

    parts: list[tuple[int, Held]]
    output: Tensor
    scattered: bool
    rank: int
    ranks: int


class Reductions:
    """The reductions of one process's step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.moment = [-1, -1]
        self.held: list[Held] = []
        self.running: list[tuple[Any, Sent]] = []  # calls that have not been waited for

    def before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sent | None:
        """Look at what a call sends; None if it is no gradient."""
        names = ARGUMENTS.get(name)
        if names is None:
            return None
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = given.get(names[-1])
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        read = [data for one in listed if (data := _read(one)) is not None]
        if not read or len(read) < len(listed) or not isinstance(given[names[0]], Tensor):
            return None
        self._look()
        starts = [0]
        for tensor in read:
            starts.append(starts[-1] + len(tensor))
        flat = read[0] if len(read) == 1 else torch.cat(read)
        parts, complete = _parts(flat, starts, self.held)
        if not complete and len(flat) > FEW and (parts or self._as_large(len(flat))):
            self.recorder.window.setdefault("unread", place())
        if not parts:
            return None
        group = next((one for one in given.values() if isinstance(one, dist.ProcessGroup)), None)
        where = (dist.get_rank(group), dist.get_world_size(group))
        sent = Sent(parts, given[names[0]], len(names) > 1, *where)
        for start, one in parts:
            self._note(one, flat[start : start + len(one.flat)], sent)
        return sent

    def after(self, sent: Sent, result: Any) -> None:
        """The call has returned: its result is there, unless it goes on."""
        if result is not None:
            self.running.append((result, sent))
        else:
            self._finish(sent)

    def waited(self, work: Any) -> None:
        """The script has waited for a call."""
        for one in [one for one in self.running if one[0] is work]:
            self.running.remove(one)
            self._finish(one[1])

    def _finish(self, sent: Sent) -> None:
        output, reduced = _read(sent.output), self.recorder.window.get("reduced", {})
        if output is None:
            return
        begin = sent.rank * len(output) if sent.scattered else 0
        for start, one in sent.parts:
            first, end = max(start, begin), min(start + len(one.flat), begin + len(output))
            piece = output[first - begin : max(first, end) - begin]
            got = projection_of(piece, first - start, len(one.flat)) if len(piece) else 0.0
            if one.name in reduced:
                reduced[one.name]["got"] = got
        size = len(output), projection_of(output, 0, len(output)), sum_of_squares(output)
        self.recorder.outputs.append(size)

    def _note(self, one: Held, part: Tensor, sent: Sent) -> None:
        reduced = self.recorder.window.setdefault("reduced", {})
        times = reduced[one.name]["times"] if one.name in reduced else 0
        value = projection_of(part, 0, len(part))
        local = self.recorder.local.get(one.key)
        whole = local is not None and abs(value - local) <= OFF * abs(local)
        self.recorder.keys_of_reduced[one.name] = one.key
        reduced[one.name] = ReducedFact(
            sent=value,
            got=None,
            local=None,
            pieces=sent.ranks if sent.scattered else 1,
            times=times + 1,
            whole=whole and (not times or reduced[one.name]["whole"]),
        )

    def _as_large(self, numel: int) -> bool:
        """Whether a tensor has as many elements as all gradients together, or a little more."""
        total = sum(len(one.flat) for one in self.held)
        return total <= numel <= 1.1 * total + 1024 and total > 0

    def _look(self) -> None:
        """Find the gradients that are there now."""
        recorder = self.recorder
        now = [recorder.session.step_count, recorder.backward_count]
        arrived = recorder.arrived
        parameters = [p for p in recorder.all_trained() if p.grad is not None or id(p) in arrived]
        if self.moment == now and len(parameters) == len(self.held) and not recorder.in_backward:
            return
        self.moment = now
        names = recorder.names.of(parameters, recorder.wrappers)
        held = [
            (name, id(p), arrived.get(id(p), p.grad))
            for name, p in zip(names, parameters, strict=True)
        ]
        found = [
            (name, key, _read(grad))
            for name, key, grad in held
            if grad is not None and not hasattr(grad, "placements")
        ]
        self.held = [Held(name, key, flat) for name, key, flat in found if flat is not None]


def _read(tensor: Tensor) -> Tensor | None:
    """The tensor's elements in a row; None if they cannot be read, or are no numbers."""
    data = dense(tensor)
    return None if data is None or not data.is_floating_point() else data.reshape(-1)


def _parts(
    flat: Tensor, starts: list[int], held: list[Held]
) -> tuple[list[tuple[int, Held]], bool]:
    """The gradients in a tensor, one after the other, and whether there is nothing else in it.

    `starts` are where its pieces begin, if it was given in pieces: there the next may begin.
    """
    found: list[tuple[int, Held]] = []
    at, factor, last, covered = 0, None, -1, 0
    while at < len(flat):
        for n in _order(flat, at, held, last):
            one = held[n]
            part = flat[at : at + len(one.flat)]
            matched = _factor(part, one.flat, factor) if len(part) == len(one.flat) else None
            if matched is not None:
                factor = matched or factor
                found.append((at, one))
                at, last, covered = at + len(part), n, covered + len(part)
                break
        else:
            at = next((start for start in starts if start > at), len(flat))
    used = sum(float(one.flat.any()) and len(one.flat) for _, one in found)
    rest = sum_of_squares(flat) - sum(
        sum_of_squares(flat[start : start + len(one.flat)]) for start, one in found
    )
    return found if used else [], rest <= OFF * sum_of_squares(flat)


def _order(flat: Tensor, at: int, held: list[Held], last: int) -> Iterator[int]:
    """Which gradients to look for first: the one that is in this memory, then the next one."""
    start = flat.data_ptr() + at * flat.element_size()
    yield from (n for n, one in enumerate(held) if one.flat.data_ptr() == start)
    yield from (n % len(held) for n in range(last + 1, last + 1 + len(held)))


def _factor(part: Tensor, gradient: Tensor, wanted: float | None) -> float | None:
    """The factor between them, the same as before if there is one; 0 for zeros; else None."""
    if part.data_ptr() == gradient.data_ptr() and part.dtype == gradient.dtype:
        return wanted or 1.0
    for every in (len(part) // 64 + 1, 1):  # at first a few elements
        ours, theirs = part[::every].double(), gradient[::every].double()
        square = float(theirs @ theirs)
        if not square and every > 1:
            continue
        if not square:
            return None if bool(ours.any()) else 0.0
        factor = float(ours @ theirs) / square
        if factor <= 0 or float((ours - factor * theirs).norm()) > OFF * float(ours.norm()):
            return None
    sure = 1.0 if wanted is None and len(part) < FEW else wanted
    return factor if sure is None or abs(factor / sure - 1) < OFF else None
