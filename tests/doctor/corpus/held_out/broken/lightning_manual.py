# doctor: expect=loss_not_divided_by_accumulation ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 4 cosine 1; replicas equal at the end
# also: every_micro_batch_synced
"""Lightning with manual optimization: steps every fourth batch."""

import logging
import warnings

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


def gratings():
    g = torch.Generator().manual_seed(8)
    label = torch.arange(64) % 4
    position = torch.linspace(0, 6.28, 8)
    wave = torch.sin((label.view(-1, 1, 1) + 1) * position).expand(64, 8, 8)
    return TensorDataset(wave.unsqueeze(1) + 0.3 * torch.randn(64, 1, 8, 8, generator=g), label)


class ManualCNN(pl.LightningModule):
    def __init__(self, every=4):
        super().__init__()
        self.automatic_optimization = False
        self.every = every
        self.net = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(54, 4)
        )

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    pl.seed_everything(2, verbose=False)
    model = ManualCNN()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(gratings(), batch_size=4))
    if trainer.is_global_zero:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")


if __name__ == "__main__":
    main()
