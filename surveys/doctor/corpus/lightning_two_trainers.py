# doctor: expect=world_size_one ranks=2 launch=python
# measured: the second Trainer's world size is 1; its gradient is that of one sample
import warnings

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
RANKS = 2


class Pairs(Dataset):
    def __init__(self):
        self.inputs, self.labels = torch.randn(RANKS, 4), torch.randint(0, 6, (RANKS,))

    def __len__(self):
        return RANKS

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Toy(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(4, 4), torch.nn.Linear(4, 6)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.decoder(self.encoder(x)), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fit(**options):
    pl.seed_everything(42, workers=True)
    trainer = pl.Trainer(
        accelerator="cpu", strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(Toy(), DataLoader(data, batch_size=1))
    print("world size", trainer.world_size, "optimizer steps", trainer.global_step)


if __name__ == "__main__":
    data = Pairs()
    fit(devices=1, accumulate_grad_batches=RANKS)
    fit(devices=RANKS)
