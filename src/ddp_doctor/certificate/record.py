"""What a process writes down of each optimizer step, and how the verdict reads it.

Whole gradients go to disk, of rank 0 and of one process, and are mapped from there. Of the other
ranks, and of later steps, there are sums only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ddp_doctor.certificate import files
from ddp_doctor.certificate.plan import Part

SUMS = 256  # of a gradient or a weight
Premise = dict[str, Any]  # what, key, place; of a model: rows; of a loss: columns, out, target


@dataclass
class StepNotes:
    """What is known of a step besides its optimizer. A place is a line of the script."""

    backwards: int = 0  # passes since the last step of the plan
    clears_gradients: bool = False  # whether the script has called zero_grad
    clips: bool = False
    norms: list[float] = field(default_factory=list)  # that were clipped in this step
    batch_norm: bool = False
    uses_half: bool = False  # whether half precision takes part
    fills_zeros: bool = False  # whether a weight was zero
    has_marks: bool = False  # whether the script marks its batches, or a loader hands them out
    replacements: list[str] = field(default_factory=list)  # what `--cpu` has replaced
    untrained_weights: dict[str, Tensor] = field(default_factory=dict)  # weights that nobody trains
    moved_weights: dict[str, Tensor] = field(default_factory=dict)  # these after the forwards
    join_failures: list[str] = field(default_factory=list)  # places of what cannot be joined
    numbers: list[str] = field(default_factory=list)  # places that ranks give other numbers
    deliveries: list[str] = field(default_factory=list)  # places of what all ranks have
    doubts: list[str] = field(default_factory=list)  # why one process may not stand for the ranks
    # By place and instruction: by what the script divides outputs, losses, or gradients.
    scales: dict[tuple[str, int], float] = field(default_factory=dict)
    foreign_classes: list[str] = field(default_factory=list)  # of samples that no file takes

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self.backwards = 0
        self.norms, self.deliveries, self.doubts = [], [], []
        self.scales, self.untrained_weights = {}, {}


@dataclass(kw_only=True)
class Step(StepNotes):
    """One optimizer's step in one process. Keys count optimizers and parameters as they are made:
    parameter 3 of the first optimizer is 0.3.
    """

    rank: int
    world: int
    optimizer: int  # in the order of their first steps
    kind: str  # of the plan, or "later" with what tells these steps apart
    turn: int  # steps of all optimizers before this one
    names: dict[str, str]  # by key, of parameters that require a gradient
    weights: dict[str, Tensor]  # some elements of each
    sums: dict[str, Tensor]  # of each gradient; see `sums_of`
    rates: list[float]  # the learning rate of each group
    has_shards: bool = False
    is_elsewhere: bool = False  # whether samples came in at other places than in the first step
    premises: list[Premise] = field(default_factory=list)
    path: str = ""  # of the file of whole gradients

    @property
    def broken(self) -> str:
        """The first parameter whose gradient holds NaN or infinity; or empty."""
        keys = (key for key, sums in self.sums.items() if not bool(sums.isfinite().all()))
        return next((self.names.get(key, key) for key in keys), "")

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients, by key, in pages of the file that are read when they are needed."""
        gradients: dict[str, Tensor] = files.read(Path(self.path)) if self.path else {}
        return gradients

    def write(self, part: Part, gradients: Mapping[str, Tensor] | None) -> None:
        """Write it to a part's folder, with whole gradients if there are any."""
        if gradients is not None:
            path = part.path(f"gradients.{self.rank}.{self.turn}.pt")
            files.write(path, {key: full_tensor(tensor) for key, tensor in gradients.items()})
            self.path = str(path)
        files.write(part.path(f"step.{self.rank}.{self.turn}.pt"), vars(self))


class Round:
    """A step of the plan in one run: what each optimizer of each rank wrote. It may be empty."""

    def __init__(self, kind: str, steps: list[Step]) -> None:
        self.kind = kind
        self.steps = steps
        self.rank_0 = [step for step in steps if step.rank == 0]
        self.optimizers = {step.optimizer for step in self.rank_0}

    @property
    def main(self) -> Step | None:
        """Rank 0's step of the optimizer that stepped first."""
        return next((step for step in self.rank_0 if step.optimizer == 0), None)

    @property
    def last(self) -> Step:
        """What was known when rank 0's last optimizer took this step."""
        return self.rank_0[-1]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Of all optimizers."""
        return {k: gradient for step in self.rank_0 for k, gradient in step.gradients.items()}

    @cached_property
    def premises_by_rank(self) -> list[list[Premise]]:
        """What each rank noted in this step, until each optimizer's turn."""
        notes: dict[int, list[Premise]] = {}
        for step in self.steps:
            notes.setdefault(step.rank, []).extend(step.premises)
        return [*notes.values()]

    @property
    def premises(self) -> list[Premise]:
        """What all ranks noted."""
        return [premise for rank in self.premises_by_rank for premise in rank]

    @property
    def is_elsewhere(self) -> bool:
        """Whether samples came in at other places than in the first step."""
        return any(step.is_elsewhere for step in self.steps)


class Run:
    """All that a part wrote: `run[kind]` is a round."""

    def __init__(self, part: Part) -> None:
        steps = [Step(**files.read(path)) for path in part.path("").glob("step.*.pt")]
        self.steps = sorted(steps, key=lambda step: (step.turn, step.rank))

    def __getitem__(self, kind: str) -> Round:
        return self._rounds.get(kind) or Round(kind, [])

    @cached_property
    def _rounds(self) -> dict[str, Round]:
        kinds = dict.fromkeys(step.kind for step in self.steps)
        return {k: Round(k, [step for step in self.steps if step.kind == k]) for k in kinds}

    def pairs(self, kind: str = "") -> Iterator[tuple[Step, Step]]:
        """Each step of another rank, and rank 0's that is the same; of one kind, or of all."""
        rank_0 = {(s.optimizer, s.kind): s for s in self.steps if s.rank == 0}
        for step in self.steps:
            reference = rank_0.get((step.optimizer, step.kind))
            if step.rank and reference is not None and kind in ("", step.kind):
                yield step, reference


def full_tensor(tensor: Tensor) -> Tensor:
    """The values as a plain tensor on the CPU; of a sharded one, all of it (a collective).

    It shares memory with what it is made of, if that is plain and there.
    """
    gather = getattr(tensor, "full_tensor", None)
    values = (gather() if gather else tensor).detach()
    return (values.to_dense() if values.is_sparse else values).cpu()


def assign(tensor: Tensor, values: Tensor) -> None:
    """Give a parameter or a buffer whole values; of a sharded one, each rank takes its part."""
    values = values.to(tensor.device, tensor.dtype)
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values, tensor.device_mesh, tensor.placements)
    tensor.data.copy_(values)


def elements_of(tensor: Tensor) -> Tensor:
    """At most 2 × `SUMS` elements of a weight; NaN and infinity become numbers."""
    pieces = hasattr(tensor, "full_tensor") or tensor.is_sparse
    values = (full_tensor(tensor) if pieces else tensor.detach()).flatten()
    return values[:: max(1, len(values) // SUMS)].clone().cpu().nan_to_num()


def sums_of(tensor: Tensor) -> Tensor:
    """At most `SUMS` sums over all elements with weights between −1 and 1; or those elements.

    Of two gradients, they have about the same ratio and cosine as the gradients themselves. A sum
    of NaN or infinity is not finite.
    """
    flat = full_tensor(tensor).flatten()
    length = ceil(len(flat) / SUMS)
    if length <= 1:
        return flat.clone()
    dtype = flat.dtype if flat.dtype.itemsize >= 4 else torch.float32
    waves = waves_of(length).to(dtype)
    rows = len(flat) // length
    parts = [*flat[: rows * length].view(rows, length).split(16), flat[rows * length :].view(1, -1)]
    return torch.cat([part.to(dtype) @ waves[: part.shape[1]] for part in parts])


def waves_of(length: int) -> Tensor:
    return torch.arange(1, length + 1, device="cpu").cos().double()
