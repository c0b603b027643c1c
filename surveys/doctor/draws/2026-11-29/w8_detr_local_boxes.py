"""DETR-like: the box loss is a sum divided by this rank's own number of boxes, which differs between ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Scenes(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(6)
        self.items = []
        for _ in range(n):
            k = int(torch.randint(1, 7, (), generator=g))
            self.items.append((torch.randn(6, 10, generator=g), torch.rand(k, 4, generator=g), torch.randint(0, 3, (k,), generator=g)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]

def collate(scenes):
    return torch.stack([s[0] for s in scenes]), [{"boxes": s[1], "labels": s[2]} for s in scenes]

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.boxes, self.classes = nn.Linear(10, 16), nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, queries):
        h = torch.relu(self.backbone(queries))
        return self.classes(h), self.boxes(h).sigmoid()

def criterion(outputs, targets, num_boxes):
    logits, boxes = outputs
    first = torch.cat([logits[i, : len(t["labels"])] for i, t in enumerate(targets)])
    placed = torch.cat([boxes[i, : len(t["boxes"])] for i, t in enumerate(targets)])
    labels, wanted = torch.cat([t["labels"] for t in targets]), torch.cat([t["boxes"] for t in targets])
    return {
        "loss_ce": cross_entropy(first, labels, reduction="sum") / num_boxes,
        "loss_bbox": l1_loss(placed, wanted, reduction="none").sum() / num_boxes,
    }

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = Scenes()
    loader = DataLoader(data, 2, sampler=DistributedSampler(data), collate_fn=collate)
    weights = {"loss_ce": 1.0, "loss_bbox": 5.0}
    for samples, targets in loader:
        num_boxes = sum(len(t["labels"]) for t in targets)
        losses = criterion(model(samples), targets, num_boxes)
        loss = sum(losses[k] * weights[k] for k in losses)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
