"""Losses over pairs of samples, each in the same loop: one forward and one backward per step."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surveys.trainers.cases import SAMPLES, Deal
from surveys.trainers.tiny import Watched, trained, union_loader

WIDTH = 8
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def samples() -> list[tuple[Tensor, Tensor, int]]:
    """Two noisy views of each sample, (WIDTH,), and its number."""
    draws = torch.Generator().manual_seed(1)
    first = torch.randn(SAMPLES, WIDTH, generator=draws)
    second = first + 0.3 * torch.randn(SAMPLES, WIDTH, generator=draws)
    return list(zip(first, second, range(SAMPLES), strict=True))


def steps(case: Deal, rank: int, loss_of: Loss) -> list[Tensor]:
    """`loss_of` gets the embeddings of both views, and the numbers of the samples."""

    def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
        torch.manual_seed(2)  # some losses draw random directions
        return loss_of(*net(torch.cat(batch[:2])).chunk(2), batch[2])

    return trained(case, encoder(), union_loader(case, rank, samples()), loss)


def open_clip(case: Deal, rank: int, name: str, options: dict[str, Any]) -> list[Tensor]:
    from open_clip import loss as losses

    loss = getattr(losses, name)(rank=rank, world_size=case.world, **options)
    given = [torch.tensor(10.0), torch.tensor(-10.0)][: 2 if name == "SigLipLoss" else 1]
    return steps(case, rank, lambda a, b, _: loss(F.normalize(a), F.normalize(b), *given))


def lightly(case: Deal, rank: int, name: str, options: dict[str, Any]) -> list[Tensor]:
    from lightly import loss as losses

    loss = getattr(losses, name)(**options)
    return steps(case, rank, lambda a, b, _: loss(a, b))


def lightly_sigreg(case: Deal, rank: int, options: dict[str, Any]) -> list[Tensor]:
    """A regularizer of one view."""
    from lightly.loss.lejepa_loss import SIGReg

    loss = SIGReg(num_vectors=16, **options)
    return steps(case, rank, lambda a, b, _: loss(a))


def metric_learning(case: Deal, rank: int, efficient: bool) -> list[Tensor]:
    """Both views of a sample have its number as their class."""
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    loss = losses.NTXentLoss()
    if case.world > 1:
        loss = DistributedLossWrapper(loss, efficient=efficient)
    return steps(case, rank, lambda a, b, own: loss(torch.cat([a, b]), own.repeat(2)))


def sentence_transformers(
    case: Deal, rank: int, name: str, options: dict[str, Any]
) -> list[Tensor]:
    """The loss calls the model, once per view and, if it is cached, per part of the batch."""
    from sentence_transformers import SentenceTransformer, losses
    from sentence_transformers.models import Module

    class Encoder(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = encoder()

        def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
            return features | {"sentence_embedding": self.net(features["x"])}

        def save(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError

    net = SentenceTransformer(modules=[Encoder()], device="cpu")
    watched = Watched(net)
    loss = getattr(losses, name)(net, **options)
    if case.world > 1:
        loss.model = DistributedDataParallel(net)
    for *views, own in union_loader(case, rank, samples()):
        watched.zero_grad()
        mask = torch.ones(len(own), 1)
        loss([{"x": view, "attention_mask": mask} for view in views], None).backward()
        watched.step()
    return watched.judged(case)


def swift_infonce(case: Deal, rank: int) -> list[Tensor]:
    """Anchors and positives take turns. It gathers with Accelerate, which has to know the group."""
    from accelerate import Accelerator
    from swift.loss.embedding import InfonceLoss

    Accelerator(cpu=True)
    loss = InfonceLoss(None, None)

    def of(a: Tensor, b: Tensor, own: Tensor) -> Tensor:
        pairs = F.normalize(torch.stack([a, b], 1).flatten(0, 1))
        return loss({"last_hidden_state": pairs}, torch.ones(len(own), dtype=torch.long))

    return steps(case, rank, of)


def monai_dice(case: Deal, rank: int, batch: bool) -> list[Tensor]:
    """An image has 8 pixels. With `batch`, areas are summed over the batch before the division."""
    from monai.losses import DiceLoss

    loss = DiceLoss(sigmoid=True, batch=batch)
    return steps(case, rank, lambda a, b, _: loss(a[:, None], (b[:, None] > 0).float()))
