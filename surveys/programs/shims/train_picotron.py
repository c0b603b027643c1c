"""Our own script for picotron and for a step of its tutorial: its `train_step`, a small network.

train_picotron.py WRAPPER. What train.py imports besides, and `train_step` does not use, is
replaced by mocks.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, os.getcwd())
unused = ["transformers", "wandb", "datasets", "dataloader", "lovely_tensors", "model"]
unused += [f"picotron.{name}" for name in ("checkpoint", "data", "model", "utils")]
for part in ("context_parallel", "tensor_parallel", "pipeline_parallel"):
    unused.append(f"picotron.{part}.{part}")
sys.modules.update({name: MagicMock() for name in unused})
folder, package = ("picotron.", "data_parallel.") if os.path.isdir("picotron") else ("", "")
pgm = importlib.import_module(f"{folder}process_group_manager")
parallel = importlib.import_module(f"{folder}{package}data_parallel")
wrapper = getattr(parallel, sys.argv[1])
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

    def __next__(self) -> dict[str, torch.Tensor]:
        tokens = torch.randint(16, (4, 9), generator=self.seeded)
        return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:]}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
sizes = dict.fromkeys(inspect.signature(pgm.setup_process_group_manager).parameters, 1)
pgm.setup_process_group_manager(**sizes | {"dp_size": dist.get_world_size()})
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
    if hasattr(model, "reset"):
        model.reset()
dist.destroy_process_group()
