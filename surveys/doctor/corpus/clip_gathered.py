# doctor: expect=none ranks=4 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""CLIP-style pre-training with negatives from all workers and gradients through the gather."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self, image_dim=12, text_dim=10, width=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(image_dim, 32), nn.ReLU(), nn.Linear(32, width))
        self.text = nn.Sequential(nn.Linear(text_dim, 32), nn.ReLU(), nn.Linear(32, width))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        image_features = F.normalize(self.image(images), dim=-1)
        text_features = F.normalize(self.text(texts), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


def clip_loss(image_features, text_features, scale):
    logits = scale * image_features @ text_features.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def distributed_clip_loss(image_features, text_features, scale):
    """This worker's rows of the similarity matrix, in both directions."""
    all_images = torch.cat(all_gather(image_features))
    all_texts = torch.cat(all_gather(text_features))
    labels = torch.arange(len(image_features)) + dist.get_rank() * len(image_features)
    per_image = scale * image_features @ all_texts.T
    per_text = scale * text_features @ all_images.T
    return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


def pairs(step, rank, n=4):
    g = torch.Generator().manual_seed(1000 * step + rank)
    latent = torch.randn(n, 6, generator=g)
    mix = torch.Generator().manual_seed(99)
    to_image = torch.randn(6, 12, generator=mix)
    to_text = torch.randn(6, 10, generator=mix)
    return latent @ to_image, latent @ to_text


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        loss = distributed_clip_loss(*model(*pairs(step, rank)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} contrastive loss {mean.item() / dist.get_world_size():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
