"""A loop without a framework: right, or wrong on purpose."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from miniddp.losses import accumulation_windows, loss_scale
from surveys.trainers.cases import Case
from surveys.trainers.tiny import IGNORED, Watched, loader, losses, model


def loop(case: Case, rank: int, counted: bool, wrapper: str = "ddp") -> list[Tensor]:
    """Sum of losses × W / N, with N over all ranks and micro-batches of the step.

    If it is not `counted`: the mean loss of each micro-batch, divided by K.
    """
    net = model()
    if composed := {"fsdp2": fully_shard, "replicate": replicate}.get(wrapper):
        own_group()
        composed(net)
    elif case.world > 1:
        net = DistributedDataParallel(net)
    optimizer = Watched(net)
    for window, tokens in accumulation_windows(loader(case, rank), case.steps, count):
        optimizer.zero_grad()
        scale = loss_scale(tokens) if dist.is_initialized() else 1 / tokens
        for batch in window:
            factor = scale if counted else 1 / max(count(batch), 1) / case.steps
            (losses(net, batch).sum() * factor).backward()
        optimizer.step()
    return optimizer.judged(case, bool(composed))


def own_group() -> None:
    """A group of one rank, if there is none."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def count(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != IGNORED).sum())
