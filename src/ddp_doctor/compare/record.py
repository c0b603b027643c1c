"""In a process of a compared command: write what its optimizers get, and the rows of its models.

Python's `sitecustomize` installs this once torch is imported. Only torch's hooks are used. The
files lie in the folder of the command, one name per content; see `verdict` for their reader.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_doctor.certificate.errors import leave
from ddp_doctor.certificate.files import read, wait_for, write
from ddp_doctor.certificate.record import assign, full_tensor
from ddp_doctor.inputs import Inputs

VARIABLE = "DDP_DOCTOR_COMPARE"
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
PATIENCE = 20.0  # seconds that a rank waits for the others to have written their last step


@dataclass(frozen=True)
class Part:
    """Which command this is. `weights`: the folder of the command whose weights it takes."""

    folder: str
    steps: int
    weights: str | None = None
    names: dict[str, str] | None = None  # a parameter of this command: its name in the other


def install() -> None:
    """Record from now on what the environment says."""
    Recorder(Part(**json.loads(os.environ[VARIABLE])))


class Recorder:
    """The record of one process; every rank writes its rows, and rank 0 all else."""

    def __init__(self, part: Part) -> None:
        self.part, self.folder = part, Path(part.folder)
        self.models: list[nn.Module] = []
        self.names: dict[int, str] = {}
        self.kept: list[Tensor] = []  # so that no id is used again
        self.steps: Counter[int] = Counter()
        self.before: dict[str, Tensor] = {}
        register_module_forward_pre_hook(self.called)
        self.inputs = Inputs().__enter__()
        register_optimizer_step_pre_hook(self.step)
        register_optimizer_step_post_hook(self.stepped)

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def called(self, module: nn.Module, args: Any) -> None:
        """Before a forward: a model that was not called before gets the common weights.

        Only outermost calls count: inside of one, `fully_shard` shows other parameters.
        """
        if self.inputs.depth or not module.training:
            return
        new = id(next(module.parameters(), None)) not in self.names
        if new and any(parameter.requires_grad for parameter in module.parameters()):
            self._take(module)

    def _take(self, module: nn.Module) -> None:
        number = len(self.models)
        self.models.append(module)
        prefix = f"{number}:" if number else ""
        tensors = {}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            for wrapper in ("module.", "_orig_mod.", "_fsdp_wrapped_module."):
                name = name.replace(wrapper, "")
            tensors[prefix + (self.part.names or {}).get(name, name)] = tensor.detach()
        for name, parameter in zip(tensors, module.parameters(), strict=False):
            self.names[id(parameter)] = name
            self.kept.append(parameter)
        for inner in module.modules():
            if isinstance(inner, DROPOUTS):
                inner.p = 0.0
        if self.part.weights is None:
            state = {name: full_tensor(tensor) for name, tensor in tensors.items()}
            self._write(f"weights.{number}.pt", state)
        else:
            self._give(tensors, Path(self.part.weights) / f"weights.{number}.pt")
        trained = {self.names[id(parameter)] for parameter in module.parameters()}
        self.before |= {n: full_tensor(t).clone() for n, t in tensors.items() if n in trained}

    def _give(self, tensors: dict[str, Tensor], file: Path) -> None:
        given = read(file) if file.exists() else {}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        wanted = {name: list(tensor.shape) for name, tensor in given.items()}
        if shapes != wanted:
            write(self.folder / "other-shapes.pt", [wanted, shapes])
            self._leave()
        for name, tensor in tensors.items():
            assign(tensor, given[name])

    def step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: what the optimizer gets. A parameter without a gradient has zeros."""
        number = self.steps.setdefault(id(optimizer), 0)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if number >= self.part.steps or not any(id(p) in self.names for p in parameters):
            return
        gradient = {}
        for at, parameter in enumerate(parameters):
            held = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            name = self.names.get(id(parameter), f"parameter {at}")
            gradient[name] = full_tensor(held)
        which = list(self.steps).index(id(optimizer))
        self._write(f"gradient.{number}.{which}.pt", gradient)
        rows = self.inputs.take()
        said = {digest: self.inputs.shown[digest] for part in rows.values() for digest in part}
        world = dist.get_world_size() if dist.is_initialized() else 1
        write(self.folder / f"rows.{number}.{which}.{self.rank}.pt", [rows, said, world])

    def stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """After a step: leave, once all optimizers have taken theirs."""
        self.steps[id(optimizer)] += 1
        if min(self.steps.values()) < self.part.steps:
            return
        moved = {}
        for model in self.models:
            for parameter in model.parameters():
                name = self.names[id(parameter)]
                moved[name] = full_tensor(parameter) - self.before[name]
        self._write("moved.pt", moved)
        self._write("optimizer.pt", type(optimizer).__name__)
        self._leave()

    def _leave(self) -> None:
        """End this process once all ranks are here: what they still do is not wanted."""
        write(self.folder / f"done.{self.rank}.pt", [])
        world = dist.get_world_size() if dist.is_initialized() else 1
        wait_for([self.folder / f"done.{rank}.pt" for rank in range(world)], PATIENCE)
        leave()

    def _write(self, name: str, value: Any) -> None:
        """What only rank 0 writes: all have computed it, as a sharded tensor needs all."""
        if self.rank == 0:
            write(self.folder / name, value)
