"""Our own script for picotron_tutorial's step 5: its `train_step` and its wrapper, a small network.

What the repository's train.py imports besides, and `train_step` does not use, is replaced by mocks.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, os.getcwd())
unused = ("transformers", "datasets", "dataloader", "lovely_tensors", "model", "wandb")
sys.modules.update({name: MagicMock() for name in unused})
pgm = importlib.import_module("process_group_manager")
wrapper = importlib.import_module("data_parallel").DataParallelNaive
train_step = importlib.import_module("train").train_step


class Network(nn.Module):
    """Logits of 16 tokens from the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layers(input_ids)


class Batches:
    """Random tokens; other ones on each rank."""

    grad_acc_steps = 2

    def __init__(self, rank: int) -> None:
        self.seeded = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        tokens = torch.randint(16, (4, 9), generator=self.seeded)
        return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:]}


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
pgm.setup_process_group_manager(dp_size=dist.get_world_size(), pp_size=1, tp_size=1)
torch.manual_seed(42)
model: nn.Module = Network().cuda()
if dist.get_world_size() > 1:
    model = wrapper(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
batches = Batches(dist.get_rank())
for _ in range(8):
    optimizer.zero_grad()
    train_step(model, batches, "cuda")
    optimizer.step()
dist.destroy_process_group()
