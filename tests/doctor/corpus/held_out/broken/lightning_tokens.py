# doctor: expect=unequal_denominators_accumulation ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1.366 cosine 0.8469; replicas equal at the end
# also: unequal_denominators
"""Lightning: masked language modelling, accumulate_grad_batches=2."""

import logging
import tempfile
import warnings

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

VOCAB = 40


class MaskedText(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        tokens = torch.randint(1, VOCAB, (12,), generator=g)
        # rare in some documents, frequent in others
        masked = torch.rand(12, generator=g) < (0.1 if i % 4 < 2 else 0.7)
        masked[0] = True
        labels = torch.where(masked, tokens, -100)
        return torch.where(masked, 0, tokens), labels


class Bert(pl.LightningModule):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCAB)
        self.loss = nn.CrossEntropyLoss(ignore_index=-100)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)))

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        return self.loss(self(tokens).flatten(0, 1), labels.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    pl.seed_everything(1, verbose=False)
    model = Bert()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=1,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(MaskedText(), batch_size=2))
    if trainer.is_global_zero:
        print(f"head {model.head.weight.norm().item():.4f}")


if __name__ == "__main__":
    main()
