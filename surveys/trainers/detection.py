"""Detection losses, each in the same loop. The images have 0 to 6 boxes.

The detector is one linear layer: it gives every image 8 boxes with scores.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from surveys.trainers.cases import SAMPLES, Deal
from surveys.trainers.tiny import trained, union_loader

BOXES = [1, 0, 2, 1, 3, 1, 5, 4, 2, 6, 3, 1]
QUERIES, CLASSES, WIDTH = 8, 5, 8
Target = dict[str, Tensor]  # class_labels (n,), boxes (n, 4) as center, width, and height
Loss = Callable[[Tensor, Tensor, list[Target]], Tensor]


def images() -> list[tuple[Tensor, Target]]:
    draws = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, WIDTH, generator=draws)
    targets = [
        {
            "class_labels": torch.randint(CLASSES, (count,), generator=draws),
            "boxes": 0.3 + 0.4 * torch.rand(count, 4, generator=draws),
        }
        for count in BOXES
    ]
    return list(zip(features, targets, strict=True))


def collate(rows: Sequence[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
    return torch.stack([features for features, _ in rows]), [target for _, target in rows]


def steps(case: Deal, rank: int, scores: int, loss_of: Loss) -> list[Tensor]:
    """`loss_of` gets logits (B, QUERIES, scores), boxes (B, QUERIES, 4), and targets."""
    torch.manual_seed(0)

    def loss(net: nn.Module, batch: tuple[Tensor, list[Target]]) -> Tensor:
        found = net(batch[0]).unflatten(1, (QUERIES, -1))
        return loss_of(found[..., :scores], found[..., scores:].sigmoid(), batch[1])

    net = nn.Linear(WIDTH, QUERIES * (scores + 4))
    return trained(case, net, union_loader(case, rank, images(), collate), loss)


def transformers_detr(case: Deal, rank: int, name: str, summed: bool = False) -> list[Tensor]:
    """With an Accelerator, as in its Trainer: the loss asks its state for the world size.

    If `summed`, Accelerate's `reduce` sums the numbers of boxes. By default it averages them.
    """
    import accelerate
    from transformers.loss import loss_for_object_detection

    accelerate.Accelerator(cpu=True)

    def loss(logits: Tensor, boxes: Tensor, targets: list[Target]) -> Tensor:
        reduce = partial(accelerate.utils.reduce, reduction="sum" if summed else "mean")
        with mock.patch.object(loss_for_object_detection, "reduce", reduce):
            return detr_losses(name, logits, boxes, targets)[0]

    return steps(case, rank, CLASSES + (name == "detr"), loss)


def detr_losses(name: str, logits: Tensor, boxes: Tensor, targets: list[Target]) -> Any:
    """What transformers returns: the weighted sum, and each loss by name."""
    from transformers.loss import loss_deformable_detr, loss_for_object_detection

    function = loss_deformable_detr.DeformableDetrForObjectDetectionLoss
    if name == "detr":
        function = loss_for_object_detection.ForObjectDetectionLoss
    costs = {"class_cost": 1, "bbox_cost": 5, "giou_cost": 2, "eos_coefficient": 0.1}
    weights = {"bbox_loss_coefficient": 5, "giou_loss_coefficient": 2, "focal_alpha": 0.25}
    config = SimpleNamespace(num_labels=CLASSES, auxiliary_loss=False, **costs, **weights)
    return function(logits, targets, logits.device, boxes, config)


def transformers_mask2former(case: Deal, rank: int) -> list[Tensor]:
    import accelerate

    accelerate.Accelerator(cpu=True)
    return steps(case, rank, CLASSES + 1, mask2former_loss)


def mask2former_loss(logits: Tensor, masks: Tensor, targets: list[Target]) -> Tensor:
    """The two losses that it divides by the number of masks; a mask has 2 x 2 pixels.

    Each of the points that it draws is the middle of the image.
    """
    from transformers.models.mask2former import modeling_mask2former as its

    weights = {"class_weight": 2.0, "mask_weight": 5.0, "dice_weight": 5.0}
    points = {"train_num_points": 4, "oversample_ratio": 3, "importance_sample_ratio": 0.75}
    config = SimpleNamespace(num_labels=CLASSES, no_object_weight=0.1, **weights, **points)
    true = [(one["boxes"] > 0.5).float().unflatten(1, (2, 2)) for one in targets]
    with mock.patch.object(torch, "rand", lambda *size, **_: torch.full(size, 0.5)):
        found = its.Mask2FormerLoss(config, {})(
            masks.unflatten(2, (2, 2)), logits, true, [one["class_labels"] for one in targets]
        )
    return 5 * (found["loss_mask"] + found["loss_dice"])


def ultralytics_rtdetr(case: Deal, rank: int) -> list[Tensor]:
    return steps(case, rank, CLASSES, rtdetr_loss)


def rtdetr_loss(logits: Tensor, boxes: Tensor, targets: list[Target]) -> Tensor:
    """The losses of a batch are summed, as its model does."""
    from ultralytics.models.utils.loss import RTDETRDetectionLoss

    criterion = RTDETRDetectionLoss(nc=CLASSES, use_vfl=True, aux_loss=False)
    batch: dict[str, Any] = {
        "cls": torch.cat([one["class_labels"] for one in targets]),
        "bboxes": torch.cat([one["boxes"] for one in targets]),
        "gt_groups": [len(one["boxes"]) for one in targets],
    }
    return torch.stack(list(criterion((boxes[None], logits[None]), batch).values())).sum()


def torchvision_fcos(case: Deal, rank: int) -> list[Tensor]:
    return steps(case, rank, CLASSES + 1, fcos_loss)


def fcos_loss(logits: Tensor, boxes: Tensor, targets: list[Target]) -> Tensor:
    """Box q of an image is matched with its q-th target, if there is one."""
    from torchvision.models.detection.fcos import FCOSHead

    head = FCOSHead(32, 1, CLASSES)  # groups of 32 channels; only its loss is used
    anchors = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(QUERIES, 1)
    outputs = {
        "cls_logits": logits[..., :CLASSES],
        "bbox_ctrness": logits[..., CLASSES:],
        "bbox_regression": boxes,
    }
    corners = [
        {"labels": one["class_labels"], "boxes": torch.cat([b[:, :2] - 0.3, b[:, :2] + 0.3], 1)}
        for one in targets
        for b in [one["boxes"]]
    ]
    order = torch.arange(QUERIES)
    matched = [order.where(order < len(one["boxes"]), -1) for one in targets]
    found = head.compute_loss(corners, outputs, [anchors] * len(targets), matched)
    return torch.stack(list(found.values())).sum()
