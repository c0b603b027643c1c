"""Records every optimizer step of an unchanged script.

Python imports a module of this name at startup when its folder is on PYTHONPATH. Each process that
steps an optimizer writes `$MEASURE_FOLDER/<rank>-<pid>.pt` at its end: per optimizer and step, the
weights before the step and the gradients it used; then the last weights, and the bytes written.
"""

import atexit
import importlib.abc
import importlib.machinery
import multiprocessing.util
import os
import sys
from pathlib import Path

MODULE = "torch.optim.optimizer"


def bytes_written() -> int:
    """Bytes this process has passed to write calls, gloo's sockets included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


class Recorder:
    """The journal of one process: a list of steps per optimizer, in the order of first steps."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.optimizers: list = []
        self.steps: list[list[dict]] = []
        self.written: list[int] = []

    def before_step(self, optimizer, args, kwargs):
        """Records now, or, where the step is handed a closure that computes them, after that."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.record(optimizer)
            return None

        def recorded_closure():
            loss = closure()
            self.record(optimizer)
            return loss

        return (optimizer,), {**kwargs, "closure": recorded_closure}

    def record(self, optimizer) -> None:
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)
            self.steps.append([])
        index = next(i for i, known in enumerate(self.optimizers) if known is optimizer)
        self.steps[index].append(
            {
                "weights": [whole(parameter) for parameter in parameters(optimizer)],
                "gradients": [whole(parameter.grad) for parameter in parameters(optimizer)],
                "learning_rate": float(optimizer.param_groups[0]["lr"]),
            }
        )
        self.written.append(bytes_written())

    def dump(self) -> None:
        import torch

        if not self.steps:
            return
        rank = 0
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", rank)))
        content = {
            "steps": self.steps,
            "final": [
                [local(parameter) for parameter in parameters(optimizer)]
                for optimizer in self.optimizers
            ],
            "written": [*self.written, bytes_written()],
        }
        torch.save(content, self.folder / f"{rank}-{os.getpid()}.pt")
        self.steps = []


def parameters(optimizer) -> list:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def whole(tensor):
    """A copy; a sharded tensor is gathered, which every rank does in the same step."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def local(tensor):
    """A copy, or None for a sharded tensor: at the end, the process group may be gone."""
    return None if hasattr(tensor, "full_tensor") else tensor.detach().clone()


class Finder(importlib.abc.MetaPathFinder):
    """Registers the recorder as soon as torch's optimizers are imported."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            recorder = Recorder(os.environ["MEASURE_FOLDER"])
            module.register_optimizer_step_pre_hook(recorder.before_step)
            atexit.register(recorder.dump)
            # Children of multiprocessing leave without atexit.
            multiprocessing.util.Finalize(None, recorder.dump, exitpriority=0)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("MEASURE_FOLDER"):
    sys.meta_path.insert(0, Finder())
