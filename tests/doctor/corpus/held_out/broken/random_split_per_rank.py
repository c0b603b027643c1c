# doctor: expect=datasets_differ ranks=2 launch=torchrun
# measured: samples trained on and held out 38, right is 0; replicas equal at the end
# also: same_data_on_ranks
"""Iris-like classification with a held-out set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


class FlowerTrainer:
    def __init__(self, seed=0):
        self.rank = dist.get_rank()
        torch.manual_seed(seed + self.rank)
        self.train_set, self.val_set = random_split(self.flowers(), [96, 24])
        self.sampler = DistributedSampler(self.train_set)
        self.loader = DataLoader(self.train_set, batch_size=12, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss_fn = nn.CrossEntropyLoss()

    @staticmethod
    def flowers():
        g = torch.Generator().manual_seed(3)
        label = torch.arange(120) % 3
        index = torch.arange(120.0).unsqueeze(1)
        x = torch.randn(120, 4, generator=g) + label.unsqueeze(1)
        # the last column identifies the flower
        return TensorDataset(torch.cat([x[:, :3], index / 120], dim=1), label)

    def epoch(self, number):
        self.sampler.set_epoch(number)
        self.model.train()
        for x, label in self.loader:
            self.optimizer.zero_grad()
            self.loss_fn(self.model(x), label).backward()
            self.optimizer.step()

    def leaked(self):
        """Validation flowers of some worker that another trains on."""
        training = torch.zeros(120)
        training[list(self.train_set.indices)] = 1
        dist.all_reduce(training)
        held_out = torch.zeros(120)
        held_out[list(self.val_set.indices)] = 1
        dist.all_reduce(held_out)
        return int(((training > 0) & (held_out > 0)).sum())


def main():
    dist.init_process_group("gloo")
    trainer = FlowerTrainer()
    for number in range(2):
        trainer.epoch(number)
    leaked = trainer.leaked()
    if trainer.rank == 0:
        print("flowers in both sets:", leaked)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
