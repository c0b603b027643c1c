"""Our own start of litgpt's `pretrain.setup`: random tokens, a tiny model, two micro-batches.

Fabric's FSDPStrategy needs a GPU, so Fabric gets its strategy "ddp" instead.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())

import lightning
import torch
from litgpt import Config, pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from torch.utils.data import DataLoader


class RandomTokens(DataModule):
    """256 rows of 17 token ids below 64."""

    def connect(self, tokenizer: Any = None, batch_size: int = 1, **given: Any) -> None:
        self.batch_size = batch_size
        self.rows = torch.randint(64, (256, 17), generator=torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self.rows, self.batch_size, shuffle=True)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


ranks = int(os.environ["WORLD_SIZE"])
fabric = lightning.Fabric


def with_ddp(*, strategy: Any, **given: Any) -> Any:
    """Fabric as litgpt asks for it, but on the CPU, and with DDP."""
    return fabric(accelerator="cpu", strategy="ddp" if ranks > 1 else "auto", **given)


lightning.Fabric = with_ddp
pretrain.setup(
    "pythia-14m",
    model_config=Config(
        name="tiny",
        block_size=16,
        vocab_size=64,
        padded_vocab_size=64,
        n_layer=1,
        n_head=2,
        n_embd=32,
    ),
    out_dir=Path("out"),
    precision="32-true",
    data=RandomTokens(),
    train=TrainArgs(
        global_batch_size=16, micro_batch_size=16 // ranks // 2, max_tokens=8192, max_norm=1.0
    ),
    eval=EvalArgs(interval=1000, max_iters=1),
    devices=ranks,
    logger_name="csv",
)
