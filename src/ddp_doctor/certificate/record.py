"""What a process writes down of each optimizer step, and how the verdict reads it.

Whole gradients go to disk one parameter at a time, of rank 0 and of one process, and are read from
there without being loaded. Of the other ranks, and of later steps, there are sums only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_doctor.certificate import files
from ddp_doctor.certificate.plan import Part

SUMS = 256  # of a gradient or a weight
ALIGNED = 16  # bytes
Seen = dict[str, Any]  # what, key, place; of a model: rows; of a loss: columns, out, target


@dataclass
class Noted:
    """What is known of a step besides its optimizer. A place is a line of the script."""

    backwards: int = 0  # passes since the last step of the plan
    cleared: bool = False  # whether the script has called zero_grad
    clips: bool = False
    norms: list[float] = field(default_factory=list)  # that were clipped in this step
    batch_norm: bool = False
    half: bool = False  # whether half precision takes part
    filled: bool = False  # whether a weight was zero
    marked: bool = False  # whether the script marks its batches, or a loader hands them out
    replaced: list[str] = field(default_factory=list)  # what `--cpu` has replaced
    untrained: dict[str, Tensor] = field(default_factory=dict)  # weights that nobody trains
    unjoined: list[str] = field(default_factory=list)  # places whose samples could not be joined
    numbers: list[str] = field(default_factory=list)  # places that ranks give other numbers
    delivered: list[str] = field(default_factory=list)  # places of what all ranks have
    doubts: list[str] = field(default_factory=list)  # why one process may not stand for the ranks
    # By place and instruction: by what the script divides outputs, losses, or gradients.
    scales: dict[tuple[str, int], float] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)  # classes of samples that no file takes


@dataclass(kw_only=True)
class Step(Noted):
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
    sharded: bool = False
    unlike: bool = False  # whether samples came in at other places than in the first step
    seen: list[Seen] = field(default_factory=list)  # see `premises`
    stored: dict[str, tuple[int, list[int], str]] = field(default_factory=dict)  # in `gradients`
    path: str = ""  # of the file of whole gradients

    @property
    def broken(self) -> str:
        """The first parameter whose gradient holds NaN or infinity; or empty."""
        every = (key for key, sums in self.sums.items() if not bool(sums.isfinite().all()))
        return next((self.names.get(key, key) for key in every), "")

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients, by key, in pages of the file that are read when they are needed."""
        if not self.stored:
            return {}
        size = Path(self.path).stat().st_size
        every = torch.from_file(self.path, False, size, dtype=torch.uint8)
        return {
            key: every[start : start + nbytes(shape, kind)].view(getattr(torch, kind)).view(shape)
            for key, (start, shape, kind) in self.stored.items()
        }

    def write(self, part: Part, gradients: Mapping[str, Tensor] | None) -> None:
        """Write it to a part's folder, with whole gradients if there are any."""
        name = f"step.{self.rank}.{self.turn}"
        part.path(name).parent.mkdir(parents=True, exist_ok=True)
        if gradients is not None:
            self.path = str(part.path(f"{name}.gradients"))
            self._store(gradients)
        files.write(part.path(f"{name}.pt"), vars(self))

    def _store(self, gradients: Mapping[str, Tensor]) -> None:
        with open(self.path, "wb") as file:
            for key, gradient in gradients.items():
                plain = whole(gradient)
                kind = str(plain.dtype).removeprefix("torch.")
                self.stored[key] = file.tell(), list(plain.shape), kind
                file.write(plain.contiguous().flatten().view(torch.uint8).numpy().data)
                file.write(b"\0" * (-file.tell() % ALIGNED))
            file.write(b"\0" * ALIGNED)  # a file of no bytes cannot be mapped


Steps = Mapping[tuple[int, int, str], Step]  # by rank, optimizer, kind


def read(part: Part) -> Steps:
    """What a part wrote, in the order of its steps."""
    steps = [Step(**files.read(path)) for path in part.path("").glob("step.*.pt")]
    steps.sort(key=lambda step: (step.turn, step.rank))
    return {(step.rank, step.optimizer, step.kind): step for step in steps}


def nbytes(shape: Sequence[int], kind: str) -> int:
    return prod(shape) * int(getattr(torch, kind).itemsize)


def whole(tensor: Tensor) -> Tensor:
    """The values as a plain tensor on the CPU; of a sharded one, all of it (a collective).

    It shares memory with what it is made of, if that is plain and there.
    """
    full = getattr(tensor, "full_tensor", None)
    plain = (full() if full else tensor).detach()
    return (plain.to_dense() if plain.is_sparse else plain).cpu()


def sampled(tensor: Tensor) -> Tensor:
    """At most 2 × `SUMS` elements of a weight; NaN and infinity become numbers."""
    pieces = hasattr(tensor, "full_tensor") or tensor.is_sparse
    flat = (whole(tensor) if pieces else tensor.detach()).flatten()
    return flat[:: max(1, len(flat) // SUMS)].clone().cpu().nan_to_num()


def sums_of(tensor: Tensor) -> Tensor:
    """At most `SUMS` sums over all elements with weights between −1 and 1; or those elements.

    Of two gradients, they have about the same ratio and cosine as the gradients themselves. A sum
    of NaN or infinity is not finite.
    """
    flat = whole(tensor).flatten()
    length = ceil(len(flat) / SUMS)
    if length <= 1:
        return flat.clone()
    kind = flat.dtype if flat.dtype.itemsize >= 4 else torch.float32
    waves = waves_of(length).to(kind)
    rows = len(flat) // length
    parts = [*flat[: rows * length].view(rows, length).split(16), flat[rows * length :].view(1, -1)]
    return torch.cat([part.to(kind) @ waves[: part.shape[1]] for part in parts])


def waves_of(length: int) -> Tensor:
    return torch.arange(1, length + 1, device="cpu").cos().double()
