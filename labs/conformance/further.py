"""Ignite; torchtune's recipe and Axolotl's loss, with stubs for what is around them."""

import runpy
from importlib.metadata import distribution
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cases import Case
from hugging_face import trainer
from plain import wrapped
from tiny import IGNORED, Watched, collate, losses, model

CHUNKS = 8  # of the logits, along the tokens


class Chunked(nn.Module):
    """Called as torchtune's recipe calls its model: returns the logits in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, tokens: Tensor, mask: Tensor) -> list[Tensor]:
        return list(self.net(input_ids=tokens, attention_mask=mask).logits.chunk(CHUNKS, dim=1))


def torchtune_recipe(case: Case, rank: int) -> list[Tensor]:
    """`train` of the recipe full_finetune_distributed, on an object that has only what it reads.

    The model is wrapped by DDP instead of FSDP2. Both average.
    """
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = DistributedDataParallel(Chunked())
    optimizer = Watched(net)
    batches = [collate(batch, case.pad) for batch in case.batches(rank)]
    names = {"input_ids": "tokens", "attention_mask": "mask", "labels": "labels"}
    loader = mock.MagicMock()
    loader.__iter__.return_value = [{names[n]: t for n, t in b.items()} for b in batches]
    recipe = mock.MagicMock(
        _model=net,
        _optimizer=optimizer,
        _optimizer_in_bwd=False,
        _dataloader=loader,
        _loss_fn=CEWithChunkedOutputLoss(CHUNKS),
        _device=torch.device("cpu"),
        ignore_labels_cache=torch.full((case.size, 1), IGNORED),
        _gradient_accumulation_steps=case.steps,
        max_steps_per_epoch=None,
        _clip_grad_norm=None,
        _lr_scheduler=None,
        _log_every_n_steps=10**9,
        _is_rank_zero=False,
        world_size=case.world,
        epochs_run=0,
        total_epochs=1,
        global_step=0,
    )
    file = distribution("torchtune").locate_file("recipes/full_finetune_distributed.py")
    train = runpy.run_path(str(file))["FullFinetuneRecipeDistributed"].train
    # It empties a GPU's cache, which torch 2.13 has not on the CPU.
    with mock.patch("torchtune.training.cleanup_before_training"):
        train(recipe)
    return optimizer.judged(case)


def axolotl_loss(case: Case, rank: int) -> list[Tensor]:
    """transformers' Trainer with Axolotl's chunked cross-entropy, which is not compiled here."""
    from axolotl.monkeypatch.loss.chunked import get_causal_lm_loss

    torch._dynamo.config.disable = True
    net = model()
    net.loss_function = get_causal_lm_loss(CHUNKS)
    return trainer(case, rank, True, net)


def ignite_trainer(case: Case, rank: int) -> list[Tensor]:
    """create_supervised_trainer with the mean loss of the batch."""
    from ignite.engine import create_supervised_trainer

    net = wrapped(case)
    optimizer = Watched(net)
    batches = [collate(batch, case.pad) for batch in case.batches(rank)]
    create_supervised_trainer(
        net,
        optimizer,
        lambda each, labels: each.sum() / (labels != IGNORED).sum(),
        model_fn=losses,
        prepare_batch=lambda batch, **_: (batch, batch["labels"]),
        gradient_accumulation_steps=case.steps,
    ).run(batches)
    return optimizer.judged(case)
