"""The forum program with two Lightning Trainers in one script, and its two bugs as switches.

The first Trainer accumulates every sample on one device. The second trains with DDP, one sample
per device and micro-batch. Both should see the gradient of the same mean. Two mistakes, each fixed
alone or together, keep them apart:

- `first_ddp`: the first Trainer is given `strategy="ddp"` although it has one device. Lightning's
  launcher then sets LOCAL_RANK, and leaves it set.
- `seed_first` is False: the data are drawn before the seed is set, so each process draws its own.

Needs pytorch_lightning, whose import takes seconds. Runs on CPUs.
"""

import logging
import os
import warnings
from typing import NamedTuple

from labkit.launch.loading import loading

with loading():
    import pytorch_lightning as pl
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.utils.data import DataLoader, TensorDataset

    from labkit.launch.lab import leave_group
    from labkit.scenarios.toy_captioner import ToyCaptioner, draw_toy_data, gradient_norms


class Program(NamedTuple):
    """One version of the program.

    `unseeded` is what a process without a seed uses instead: process r seeds with `unseeded + r`,
    so that a run can be repeated. None leaves it truly unseeded.
    """

    first_ddp: bool
    seed_first: bool
    seed: int
    devices: int
    accumulate: int
    unseeded: int | None


class Seen(NamedTuple):
    """What one process recorded. Norms map a parameter's name to its gradient's norm."""

    local_rank_left: str | None  # LOCAL_RANK between the two Trainers
    accumulated: dict[str, float]
    after_each_backward: list[float]  # encoder.weight, in the first Trainer
    printed: list[str]  # by the second Trainer
    samples: list[int]  # that the second Trainer's sampler gave to this process
    trainer_world_size: int
    group_size: int
    ddp: dict[str, float]
    at_batch_end: float  # encoder.weight in on_train_batch_end, after the optimizer step


class GradientPrinter(pl.LightningModule):
    """The toy captioner, trained by Lightning, with a record of its gradients' norms."""

    def __init__(self) -> None:
        super().__init__()
        self.captioner = ToyCaptioner()
        self.printed: list[str] = []
        self.after_each_backward: list[float] = []
        self.norms: dict[str, float] = {}
        self.at_batch_end = 0.0
        self.group_size = 1

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.printed.append(f"GPU {self.global_rank}: batch_idx: {batch_idx}")
        return self.captioner(*batch)

    def on_after_backward(self) -> None:
        self.after_each_backward.append(gradient_norms(self.captioner)["encoder.weight"])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms = gradient_norms(self.captioner)

    def on_train_batch_end(self, *_: object) -> None:
        self.at_batch_end = gradient_norms(self.captioner)["encoder.weight"]
        self.group_size = dist.get_world_size() if dist.is_initialized() else 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def run(program: Program) -> list[Seen]:
    """Run both Trainers in this process, and return what each process of the second one saw.

    Lightning starts the second Trainer's other processes by running this script again, so every
    process calls this function. Each of them returns the whole list, in the order of ranks.
    """
    _silence()
    data = _draw(program)

    pl.seed_everything(program.seed, workers=True, verbose=False)
    first = GradientPrinter()
    strategy = "ddp" if program.first_ddp else "auto"
    trainer = _trainer(devices=1, strategy=strategy, accumulate_grad_batches=len(data))
    trainer.fit(first, DataLoader(data, batch_size=1))
    local_rank_left = os.environ.get("LOCAL_RANK")

    pl.seed_everything(program.seed, workers=True, verbose=False)
    second = GradientPrinter()
    trainer = _trainer(
        devices=program.devices, strategy="ddp", accumulate_grad_batches=program.accumulate
    )
    trainer.fit(second, DataLoader(data, batch_size=1))

    seen = Seen(
        local_rank_left=local_rank_left,
        accumulated=first.norms,
        after_each_backward=first.after_each_backward,
        printed=second.printed,
        samples=list(trainer.train_dataloader.sampler),
        trainer_world_size=trainer.world_size,
        group_size=second.group_size,
        ddp=second.norms,
        at_batch_end=second.at_batch_end,
    )
    return _gather(seen)


def _draw(program: Program) -> TensorDataset:
    if program.seed_first:
        pl.seed_everything(program.seed, workers=True, verbose=False)
    elif program.unseeded is not None:
        torch.manual_seed(program.unseeded + int(os.environ.get("LOCAL_RANK", "0")))
    return draw_toy_data(program.devices * program.accumulate)


def _trainer(**options: object) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _gather(seen: Seen) -> list[Seen]:
    everyone: list[Seen] = [seen] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    leave_group()
    return everyone


def _silence() -> None:
    # Lightning reports GPUs, tips, and workers on stderr; only failures matter here.
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
