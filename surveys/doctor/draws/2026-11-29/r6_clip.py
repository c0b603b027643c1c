"""open_clip's loss: local_loss and gather_with_grad, learned temperature."""
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = nn.Linear(12, 8), nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        image = F.normalize(self.visual(image), dim=-1)
        text = F.normalize(self.text(text).mean(1), dim=-1)
        return image, text, self.logit_scale.exp()

class Pairs(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(9)
        self.image, self.text = torch.randn(n, 12, generator=g), torch.randint(0, 50, (n, 5), generator=g)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.text[i]

class ClipLoss(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def forward(self, image_features, text_features, logit_scale):
        all_image = torch.cat(torch.distributed.nn.all_gather(image_features), dim=0)
        all_text = torch.cat(torch.distributed.nn.all_gather(text_features), dim=0)
        logits_per_image = logit_scale * image_features @ all_text.T
        logits_per_text = logit_scale * text_features @ all_image.T
        labels = torch.arange(len(image_features)) + len(image_features) * self.rank
        return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2

def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(CLIP())
    loss_fn = ClipLoss(rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Pairs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for image, text in loader:
            optimizer.zero_grad()
            loss = loss_fn(*model(image, text))
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, 4.6052)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
