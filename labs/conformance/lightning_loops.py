"""Lightning's Trainer and Fabric, each with the usual mean loss and with a global count."""

from typing import Any

from lightning_fabric import Fabric
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from cases import Case
from tiny import Watched, collate, losses, model


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.watched = Watched(self.net)

    def configure_optimizers(self) -> Watched:
        return self.watched

    def training_step(self, batch: dict[str, Any], _: int) -> Tensor:
        return losses(self.net, batch).sum() * batch["scale"]


def trainer(case: Case, rank: int, counted: bool) -> list[Tensor]:
    module = Module()
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    off = dict.fromkeys(("use_distributed_sampler", *shown), False)
    trainer = Trainer(**where(case), accumulate_grad_batches=case.steps, max_epochs=1, **off)
    trainer.fit(module, own_batches(case, rank, counted))
    return module.watched.judged(case)


def fabric(case: Case, rank: int, counted: bool) -> list[Tensor]:
    """As in the guide, where nothing divides by K. `counted` divides, and counts."""
    fabric = Fabric(**where(case))
    fabric.launch()
    net = model()
    watched = Watched(net)
    net, optimizer = fabric.setup(net, watched)
    loader = own_batches(case, rank, counted)
    for i, batch in enumerate(loader):
        accumulating = (i + 1) % case.steps != 0 and i + 1 < len(loader)
        with fabric.no_backward_sync(net, enabled=accumulating):
            loss = losses(net, batch).sum() * batch["scale"]
            fabric.backward(loss / case.steps if counted else loss)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return watched.judged(case)


def where(case: Case) -> dict[str, Any]:
    strategy = "ddp" if case.world > 1 else "auto"
    return {"accelerator": "cpu", "devices": case.world, "strategy": strategy}


def own_batches(case: Case, rank: int, counted: bool) -> DataLoader:
    """Batches with a `scale` for summed losses: 1 / own tokens, or W × K / tokens of the step."""
    batches = []
    for i, samples in enumerate(case.batches(rank)):
        factor = case.world * case.steps / case.tokens(i // case.steps)
        own = 1 / max(1, sum(one.count for one in samples))
        batches.append(collate(samples, case.pad) | {"scale": factor if counted else own})
    return DataLoader(batches, batch_size=None)
