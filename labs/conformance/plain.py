"""Loops without a framework: one that is right, and one that is wrong on purpose."""

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cases import Case
from miniddp.training import accumulation_windows, loss_scale
from tiny import IGNORED, Watched, collate, losses, model


def right(case: Case, rank: int) -> list[Tensor]:
    """Sum of losses × W / N, with N over all ranks and micro-batches of the step."""
    net = wrapped(case)
    optimizer = Watched(net)
    batches = [collate(batch, case.pad) for batch in case.batches(rank)]
    count = lambda batch: int((batch["labels"] != IGNORED).sum())  # noqa: E731
    for window, tokens in accumulation_windows(batches, case.steps, count):
        optimizer.zero_grad()
        scale = loss_scale(tokens) if case.world > 1 else 1 / tokens
        for batch in window:
            (losses(net, batch).sum() * scale).backward()
        optimizer.step()
    return optimizer.judged(case)


def mean_of_means(case: Case, rank: int) -> list[Tensor]:
    """The mean loss of each micro-batch, divided by K; DDP averages over the ranks."""
    net = wrapped(case)
    optimizer = Watched(net)
    for i, samples in enumerate(case.batches(rank)):
        batch = collate(samples, case.pad)
        scored = (batch["labels"] != IGNORED).sum()
        (losses(net, batch).sum() / scored / case.steps).backward()
        if (i + 1) % case.steps == 0 or (i + 1) * case.world * case.size == len(case.samples):
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.judged(case)


def wrapped(case: Case) -> DistributedDataParallel:
    return DistributedDataParallel(model()) if case.world > 1 else model()
