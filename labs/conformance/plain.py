"""A loop without a framework: right, or wrong on purpose."""

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cases import Case
from miniddp.training import accumulation_windows, loss_scale
from tiny import IGNORED, Watched, loader, losses, model


def loop(case: Case, rank: int, counted: bool) -> list[Tensor]:
    """Sum of losses × W / N, with N over all ranks and micro-batches of the step.

    If it is not `counted`: the mean loss of each micro-batch, divided by K.
    """
    net = DistributedDataParallel(model()) if case.world > 1 else model()
    optimizer = Watched(net)
    for window, tokens in accumulation_windows(loader(case, rank), case.steps, count):
        optimizer.zero_grad()
        scale = loss_scale(tokens) if case.world > 1 else 1 / tokens
        for batch in window:
            factor = scale if counted else 1 / max(count(batch), 1) / case.steps
            (losses(net, batch).sum() * factor).backward()
        optimizer.step()
    return optimizer.judged(case)


def count(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != IGNORED).sum())
