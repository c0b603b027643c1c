"""Losses of verl, OpenRLHF, Liger, and Unsloth, in our own loop, without what calls them.

They get the counts of the whole step, as their docstrings ask.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import distribution
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from surveys.trainers.cases import Case
from surveys.trainers.tiny import IGNORED, collate_counted, losses, model, trained

Aggregate = Callable[..., Tensor]
Batch = dict[str, Tensor]
TEMPORARY = f"{tempfile.gettempdir()}/unsloth_compiled_cache"


class Aggregated(nn.Module):
    """The policy is the one that sampled, so a token's loss is −A · log p, but for a constant."""

    def __init__(self, case: Case, aggregate: Aggregate) -> None:
        super().__init__()
        self.net = model()
        self.case, self.aggregate = case, aggregate

    def forward(self, batch: Batch) -> Tensor:
        return self.aggregate(
            losses(self.net, batch) * batch["advantages"][:, None],
            scored(batch),
            dp_size=self.case.world,
            batch_num_tokens=int(batch["step_tokens"]),
            global_batch_size=self.case.world * self.case.steps * self.case.size,
        )


def loop(case: Case, rank: int, net: nn.Module) -> list[Tensor]:
    """`net` gives the loss of a micro-batch."""
    batches = DataLoader(case.own(rank), case.size, collate_fn=partial(collate, pad=case.pad))
    return trained(case, net, batches, lambda wrapped, batch: wrapped(batch))


def scored(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).float()


def collate(rows: Sequence[dict[str, Any]], pad: int) -> Batch:
    """Advantages are part of the batch, so that a certificate deals them with their samples."""
    advantages = torch.tensor([one["reward"] for one in rows])
    return collate_counted(rows, pad) | {"advantages": advantages}


def verl(case: Case, rank: int, mode: str) -> list[Tensor]:
    aggregate = importlib.import_module("verl.trainer.ppo.core_algos").agg_loss
    net = Aggregated(case, lambda loss, mask, **n: aggregate(loss, mask, mode, **n))
    return loop(case, rank, net)


def openrlhf(case: Case, rank: int, tokens: bool) -> list[Tensor]:
    """Its package needs DeepSpeed, and its losses do not: only their file is imported."""
    folder = distribution("openrlhf").locate_file("openrlhf")
    packages: dict[str, Any] = {"deepspeed": mock.MagicMock()}
    for name, path in (("openrlhf", folder), ("openrlhf.models", folder / "models")):
        packages[name] = ModuleType(name)
        packages[name].__path__ = [str(path)]
    sys.modules.update(packages)
    aggregate = importlib.import_module("openrlhf.models.loss").aggregate_loss
    del sys.modules["deepspeed"]
    net = Aggregated(
        case, lambda loss, mask, **n: aggregate(loss, mask, token_level_loss=tokens, **n)
    )
    return loop(case, rank, net)


class Fused(nn.Module):
    """Liger's fused loss takes the hidden states and the weight of the last layer."""

    def __init__(self, name: str) -> None:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        super().__init__()
        self.net = model()
        options = {"beta": 0.0, "compiled": False, "use_ref_model": False}
        self.loss = LigerFusedLinearGRPOLoss(loss_type=name, **options)

    def forward(self, batch: Batch) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        hidden = self.net.model(**inputs).last_hidden_state[:, :-1]
        loss, _ = self.loss(
            hidden,
            self.net.lm_head.weight,
            batch["input_ids"][:, 1:],
            scored(batch),
            batch["advantages"],
            num_items_in_batch=batch["step_tokens"],
        )
        return loss


def liger_kernel(case: Case, rank: int, name: str) -> list[Tensor]:
    return loop(case, rank, Fused(name))


class FusedMean(nn.Module):
    """Unsloth's fused cross-entropy of supervised fine-tuning, not compiled."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net, self.world = model(), case.world

    def forward(self, batch: Batch) -> Tensor:
        # Or the import asks for all of Unsloth, and it writes files to the working directory.
        os.environ |= {"UNSLOTH_IS_PRESENT": "1", "UNSLOTH_COMPILE_LOCATION": TEMPORARY}
        loss = importlib.import_module("unsloth_zoo.loss_utils").unsloth_fused_ce_loss
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        hidden = self.net.model(**inputs).last_hidden_state
        given = None, hidden, self.net.lm_head.weight, None, batch["labels"]
        count = batch["step_tokens"] / self.world
        return loss(*given, n_items=count, target_gb=1, torch_compile=False)


def unsloth(case: Case, rank: int) -> list[Tensor]:
    return loop(case, rank, FusedMean(case))
