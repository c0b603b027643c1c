"""Loss aggregation of verl and OpenRLHF, as functions in our own loop, without what calls them.

They get the counts of the whole step, as their docstrings ask.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cases import Case
from tiny import IGNORED, Watched, collate, losses, model

Aggregate = Callable[..., Tensor]


def loop(case: Case, rank: int, aggregate: Aggregate) -> list[Tensor]:
    """The policy is the one that sampled, so a token's loss is −A · log p, but for a constant."""
    net = DistributedDataParallel(model()) if case.world > 1 else model()
    watched = Watched(net)
    for i, samples in enumerate(case.batches(rank)):
        batch = collate(samples, case.pad)
        mask = (batch["labels"][:, 1:] != IGNORED).float()
        advantages = torch.tensor([one.reward for one in samples])
        number = i // case.steps
        taken = [one for of_rank in case.window(number) for part in of_rank for one in part]
        aggregate(
            losses(net, batch) * advantages[:, None],
            mask,
            dp_size=case.world,
            batch_num_tokens=case.tokens(number),
            global_batch_size=len(taken),
        ).backward()
        if (i + 1) % case.steps == 0:
            watched.step()
            watched.zero_grad()
    return watched.judged(case)


def verl(case: Case, rank: int, mode: str) -> list[Tensor]:
    """Its requirements include ray, so it is in no extra of this project."""
    aggregate = importlib.import_module("verl.trainer.ppo.core_algos").agg_loss
    return loop(case, rank, lambda loss, mask, **n: aggregate(loss, mask, mode, **n))


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
    return loop(
        case, rank, lambda loss, mask, **n: aggregate(loss, mask, token_level_loss=tokens, **n)
    )
