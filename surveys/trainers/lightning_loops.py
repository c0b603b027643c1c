"""Lightning's Trainer and Fabric, each with the usual mean loss and with a global count."""

from typing import Any

from lightning_fabric import Fabric
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from surveys.trainers.cases import Case
from surveys.trainers.tiny import IGNORED, Watched, loader, losses, model


class Module(LightningModule):
    def __init__(self, case: Case, counted: bool) -> None:
        super().__init__()
        self.case, self.counted = case, counted
        self.net = model()
        self.watched = Watched(self.net)

    def configure_optimizers(self) -> Watched:
        return self.watched

    def training_step(self, batch: dict[str, Any], _: int) -> Tensor:
        return losses(self.net, batch).sum() * scale(batch, self.case, self.counted)


def trainer(case: Case, rank: int, counted: bool) -> list[Tensor]:
    module = Module(case, counted)
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    off = dict.fromkeys(("use_distributed_sampler", *shown), False)
    trainer = Trainer(**where(case), accumulate_grad_batches=case.steps, max_epochs=1, **off)
    trainer.fit(module, loader(case, rank))
    return module.watched.judged(case)


def fabric(case: Case, rank: int, counted: bool) -> list[Tensor]:
    """As in the guide, where nothing divides by K. `counted` divides, and counts."""
    fabric = Fabric(**where(case))
    fabric.launch()
    net = model()
    watched = Watched(net)
    net, optimizer = fabric.setup(net, watched)
    batches = loader(case, rank)
    for i, batch in enumerate(batches):
        accumulating = (i + 1) % case.steps != 0 and i + 1 < len(batches)
        with fabric.no_backward_sync(net, enabled=accumulating):
            loss = losses(net, batch).sum() * scale(batch, case, counted)
            fabric.backward(loss / case.steps if counted else loss)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return watched.judged(case)


def where(case: Case) -> dict[str, Any]:
    strategy = "ddp" if case.world > 1 else "auto"
    return {"accelerator": "cpu", "devices": case.world, "strategy": strategy}


def scale(batch: dict[str, Any], case: Case, counted: bool) -> float:
    """What a sum of losses is multiplied by: W × K / tokens of the step, or 1 / own tokens."""
    if counted:
        return case.world * case.steps / int(batch["step_tokens"])
    return 1 / max(1, int((batch["labels"] != IGNORED).sum()))
