"""The thread's own program on PyTorch Lightning: accumulate on one device, or ddp on several.

    python labs/accumulate_vs_ddp_lightning.py       ddp on 4 CPU devices, one sample each
    python labs/accumulate_vs_ddp_lightning.py --devices 1 --accumulate 4
    python labs/accumulate_vs_ddp_lightning.py --devices 2 --accumulate 2

Run it with python, not with torchrun: Lightning's strategy "ddp" starts this file again for every
further device, with different environment variables. All top-level code therefore runs once per
process, and random draws must be seeded before they are made.

For each rank the script prints the batches it saw and the norm of encoder.weight's gradient after
each backward pass. It also prints every gradient norm just before the optimizer step, when the
gradients are complete. With the thread's seed and four samples, a column shows the thread's norms.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from typing import NamedTuple

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from labkit.book.tables import Cell, table
from labkit.scenarios.toy_captioner import (
    PRINTED,
    SEED,
    ToyCaptioner,
    gradient_norms,
    seeded_toy_data,
)

SAMPLES = 4  # the thread's


class SeenByRank(NamedTuple):
    """What one rank noted."""

    batches: list[int]
    after_backward: list[float]
    norms: dict[str, float]


class LightningCaptioner(pl.LightningModule):
    """Notes the index of each batch, and the gradient norms where they are complete."""

    def __init__(self, compare: bool) -> None:
        super().__init__()
        self.compare = compare
        self.captioner = ToyCaptioner()
        self.batches: list[int] = []
        self.after_backward: list[float] = []
        self.norms: dict[str, float] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batches.append(batch_idx)
        return self.captioner(*batch)

    def on_after_backward(self) -> None:
        self.after_backward.append(gradient_norms(self.captioner)["encoder.weight"])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms = gradient_norms(self.captioner)

    def on_train_end(self) -> None:
        # The last place where the process group certainly stands.
        mine = SeenByRank(self.batches, self.after_backward, self.norms)
        report: list[SeenByRank] = [mine]
        if dist.is_initialized():
            report = [mine] * dist.get_world_size()
            dist.all_gather_object(report, mine)
        if self.global_rank == 0:
            print_report(report, self.compare)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def print_report(report: list[SeenByRank], compare: bool) -> None:
    """`compare`: the thread printed these norms, too."""
    for rank, seen in enumerate(report):
        batches = " ".join(map(str, seen.batches))
        norms = " ".join(f"{norm:.4f}" for norm in seen.after_backward)
        print(f"rank {rank}: batch_idx {batches}, encoder.weight after each backward {norms}")
    rows: list[list[Cell]] = []
    for name in report[0].norms:
        norms = [seen.norms[name] for seen in report]
        if compare:
            equal = all(f"{norm:.4f}" == f"{PRINTED[name]:.4f}" for norm in norms)
            rows.append([name, PRINTED[name], *norms, equal])
        else:
            rows.append([name, *norms])
    ranks = [f"rank {rank}" for rank in range(len(report))]
    headers = ["parameter", "the thread", *ranks, "equal"] if compare else ["parameter", *ranks]
    print(table(headers, rows), flush=True)


def arguments_of_this_lab() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4, help="CPU devices (default 4)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step (default 1)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"default {SEED}")
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of_this_lab()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.exit(
            "Lightning starts its ranks itself. Run it without torchrun: "
            "python labs/accumulate_vs_ddp_lightning.py"
        )
    # Lightning tells on stderr of GPUs, tips and workers; here only a failure matters.
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    samples = arguments.devices * arguments.accumulate
    data = seeded_toy_data(arguments.seed, samples)
    compare = arguments.seed == SEED and samples == SAMPLES
    pl.seed_everything(arguments.seed, workers=True, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy="ddp" if arguments.devices > 1 else "auto",
        accumulate_grad_batches=arguments.accumulate,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LightningCaptioner(compare), DataLoader(data, batch_size=1))


if __name__ == "__main__":
    main()
