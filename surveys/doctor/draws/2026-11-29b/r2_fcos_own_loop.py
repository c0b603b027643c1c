"""An FCOS-like dense detector: focal loss over the mean number of positives of all ranks; own loop, no loader."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

CLASSES, SIZE = 3, 8


class Scenes(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(11)
        self.images = torch.randn(n, 3, SIZE, SIZE, generator=g)
        self.boxes = []
        for _ in range(n):
            k = int(torch.randint(1, 5, (), generator=g))
            corner = torch.randint(0, SIZE - 3, (k, 2), generator=g)
            side = torch.randint(1, 4, (k, 2), generator=g)
            labels = torch.randint(0, CLASSES, (k,), generator=g)
            self.boxes.append((torch.cat([corner, corner + side], 1), labels))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], *self.boxes[i]


def collate(samples):
    images, boxes, labels = zip(*samples)
    return torch.stack(images), list(boxes), list(labels)


class FCOS(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, dim, 3, padding=1), nn.GroupNorm(3, dim), nn.ReLU()
        )
        self.cls = nn.Conv2d(dim, CLASSES, 3, padding=1)
        self.reg = nn.Conv2d(dim, 4, 3, padding=1)
        self.ctr = nn.Conv2d(dim, 1, 3, padding=1)
        nn.init.constant_(self.cls.bias, -2.0)

    def forward(self, images):
        x = self.backbone(images)
        flat = [head(x).flatten(2).transpose(1, 2) for head in (self.cls, self.reg, self.ctr)]
        return flat[0], flat[1].exp(), flat[2].squeeze(-1)


def assign(boxes, labels):
    """Per location the class (CLASSES is background) and the distances to the sides."""
    ys, xs = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    xy = torch.stack([xs, ys], -1).view(-1, 2).float() + 0.5
    cls = torch.full((len(xy),), CLASSES)
    reg = torch.ones(len(xy), 4)
    for box, label in zip(boxes.float(), labels):
        sides = torch.cat([xy - box[:2], box[2:] - xy], 1)
        inside = sides.min(1).values > 0
        cls[inside], reg[inside] = label, sides[inside]
    return cls, reg


def reduce_mean(tensor):
    if not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor.div_(dist.get_world_size()), op=dist.ReduceOp.SUM)
    return tensor


def losses(outputs, boxes, labels):
    cls_score, reg_pred, ctr_pred = (o.flatten(0, 1) for o in outputs)
    cls, reg = (torch.cat(t) for t in zip(*(assign(b, c) for b, c in zip(boxes, labels))))
    positive = cls < CLASSES
    num_pos = reduce_mean(positive.sum().float()).clamp(min=1.0)
    target = F.one_hot(cls, CLASSES + 1)[:, :CLASSES].float()
    p = cls_score.sigmoid()
    pt = torch.where(target == 1, p, 1 - p)
    weight = torch.where(target == 1, 0.25, 0.75) * (1 - pt) ** 2
    bce = F.binary_cross_entropy_with_logits(cls_score, target, reduction="none")
    loss_cls = (weight * bce).sum() / num_pos
    lr, tb = reg[positive][:, [0, 2]], reg[positive][:, [1, 3]]
    centerness = (lr.min(1).values / lr.max(1).values * tb.min(1).values / tb.max(1).values).sqrt()
    denominator = reduce_mean(centerness.sum()).clamp(min=1e-6)
    l1 = F.smooth_l1_loss(reg_pred[positive], reg[positive], reduction="none").sum(1)
    loss_reg = (l1 * centerness).sum() / denominator
    loss_ctr = (
        F.binary_cross_entropy_with_logits(ctr_pred[positive], centerness, reduction="sum")
        / num_pos
    )
    return {"loss_cls": loss_cls, "loss_bbox": loss_reg, "loss_centerness": loss_ctr}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(FCOS())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    data = Scenes()
    rank, world, batch = dist.get_rank(), dist.get_world_size(), 4
    for epoch in range(2):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))[
            rank::world
        ]
        for start in range(0, len(order), batch):
            images, boxes, labels = collate([data[int(i)] for i in order[start : start + batch]])
            log_vars = losses(model(images), boxes, labels)
            loss = sum(log_vars.values())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 35.0, norm_type=2)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
