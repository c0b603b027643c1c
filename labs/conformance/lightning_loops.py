"""Lightning's Trainer and Fabric, each with the usual mean loss and with a global count."""

from typing import Any

from lightning_fabric import Fabric
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from cases import Case
from tiny import IGNORED, Watched, collate, losses, model

Batch = dict[str, Tensor]


def loss_of(net: Any, batch: Batch, case: Case, i: int, counted: bool) -> Tensor:
    """The batch's mean; or its sum × W × K / N, where N counts the window of micro-batch i."""
    total = losses(net, batch).sum()
    if not counted:
        return total / (batch["labels"] != IGNORED).sum()
    start = i // case.steps * case.steps
    taken = [case.batches(rank)[start : start + case.steps] for rank in range(case.world)]
    tokens = sum(one.count for of_rank in taken for samples in of_rank for one in samples)
    return total * case.world * case.steps / tokens


class Module(LightningModule):
    def __init__(self, case: Case, counted: bool) -> None:
        super().__init__()
        self.net, self.case, self.counted = model(), case, counted
        self.watched = Watched(self.net)

    def configure_optimizers(self) -> Watched:
        return self.watched

    def training_step(self, batch: Batch, i: int) -> Tensor:
        return loss_of(self.net, batch, self.case, i, self.counted)


def trainer(case: Case, rank: int, counted: bool) -> list[Tensor]:
    module = Module(case, counted)
    Trainer(
        accelerator="cpu",
        devices=case.world,
        strategy="ddp" if case.world > 1 else "auto",
        accumulate_grad_batches=case.steps,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, own_batches(case, rank))
    return module.watched.judged(case)


def fabric(case: Case, rank: int, counted: bool) -> list[Tensor]:
    """As in the guide, where nothing divides by K. `counted` divides, and counts."""
    strategy = "ddp" if case.world > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=case.world, strategy=strategy)
    fabric.launch()
    net = model()
    watched = Watched(net)
    net, optimizer = fabric.setup(net, watched)
    loader = fabric.setup_dataloaders(own_batches(case, rank), use_distributed_sampler=False)
    batches = len(loader)
    for i, batch in enumerate(loader):
        accumulating = (i + 1) % case.steps != 0 and i + 1 < batches
        with fabric.no_backward_sync(net, enabled=accumulating):
            loss = loss_of(net, batch, case, i, counted)
            fabric.backward(loss / case.steps if counted else loss)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return watched.judged(case)


def own_batches(case: Case, rank: int) -> DataLoader:
    return DataLoader([collate(batch, case.pad) for batch in case.batches(rank)], batch_size=None)
