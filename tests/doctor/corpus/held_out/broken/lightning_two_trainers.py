# doctor: expect=world_size_one ranks=2 launch=python
# measured: processes of the second Trainer 1, right is 2
"""Compares gradient accumulation with two processes, in one script."""

import logging
import warnings

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def on_train_start(self):
        self.processes = torch.distributed.get_world_size()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def points():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True))


def fit(devices, accumulate):
    pl.seed_everything(5, verbose=False)
    model = Regressor()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=devices,
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(points(), batch_size=4))
    return trainer, model


if __name__ == "__main__":
    trainer, alone = fit(devices=1, accumulate=2)
    trainer, together = fit(devices=2, accumulate=1)
    if trainer.is_global_zero:
        for name, model in (("accumulation", alone), ("two devices", together)):
            norm = nn.utils.parameters_to_vector(model.parameters()).norm()
            print(f"{name}: {norm.item():.5f}")
        print("processes:", together.processes)
