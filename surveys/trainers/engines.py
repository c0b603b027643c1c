"""torchtitan's train step, Composer's Trainer, and DeepSpeed's engine with ZeRO."""

import os
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from surveys.trainers.cases import Case
from surveys.trainers.further import OnlyTokens
from surveys.trainers.plain import own_group
from surveys.trainers.tiny import (
    IGNORED,
    NoStepError,
    Watched,
    collate_counted,
    loader,
    losses,
    model,
)

Batch = dict[str, Tensor]


def torchtitan_step(case: Case, rank: int) -> list[Tensor]:
    """`train_step` of its Trainer, on an object that has only what it reads, with its loss.

    The model is sharded by FSDP2, which sums, as torchtitan sets it.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
    from torchtitan.trainer import Trainer

    own_group()
    net = fully_shard(OnlyTokens())
    disable_fsdp_gradient_division(net)
    net.set_force_sum_reduction_for_comms(True)  # gloo has no other
    optimizer = Watched(net)
    dims = mock.MagicMock(dp_enabled=case.world > 1, pp_enabled=False, cp_enabled=False)
    dims.ep_enabled = False
    dims.get_mesh.return_value = init_device_mesh("cpu", (case.world,))
    dims.get_optional_mesh.return_value = None
    trainer = mock.MagicMock(
        optimizers=optimizer,
        parallel_dims=dims,
        model_parts=[net],
        loss_fn=CrossEntropyLoss(CrossEntropyLoss.Config()),
        gradient_accumulation_steps=case.steps,
        num_pipeline_parallel_microbatches=1,
        device=torch.device("cpu"),
        train_context=nullcontext,
        ntokens_seen=0,
    )
    trainer.config.training.max_norm = float("inf")
    trainer.metrics_processor.should_log.return_value = False
    trainer.fwd_bwd_fn = MethodType(Trainer._forward_backward_body, trainer)
    for name in ("forward_backward_step", "post_dataloading_process"):
        setattr(trainer, name, MethodType(getattr(Trainer, name), trainer))
    batches = next_words(case, rank)
    with suppress(StopIteration):  # as its loop does when the data run out
        while True:
            Trainer.train_step(trainer, batches)
    return optimizer.judged(case, sharded=True)


def next_words(case: Case, rank: int) -> Iterator[tuple[Batch, Tensor]]:
    """Tokens, each with the next one as its label."""
    for batch in loader(case, rank):
        yield {"input": batch["input_ids"][:, :-1]}, batch["labels"][:, 1:]


def composer(case: Case, rank: int, on_tokens: bool) -> list[Tensor]:
    """It splits a batch into micro-batches, and weights them by samples or, if asked, by tokens."""
    from composer import ComposerModel, DataSpec, Trainer

    class Own(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, batch: Batch) -> Tensor:
            return losses(self.net, batch)

        def loss(self, outputs: Tensor, batch: Batch, *_: Any, **__: Any) -> Tensor:
            return outputs.sum() / max(1, scored(batch))

    net = Own()
    optimizer = Watched(net)
    own = case.own(rank)
    batches = DataLoader(
        own,
        case.size * case.steps,
        sampler=DistributedSampler(own, num_replicas=1, rank=0, shuffle=False),  # it asks for one
        collate_fn=partial(collate, pad=case.pad),
    )
    Trainer(
        model=net,
        train_dataloader=DataSpec(
            batches,
            get_num_tokens_in_batch=lambda batch: dict.fromkeys(
                ("total", "loss_generating"), scored(batch)
            ),
        ),
        optimizers=optimizer,
        max_duration="1ep",
        device="cpu",
        device_train_microbatch_size=case.size,
        accumulate_train_batch_on_tokens=on_tokens,
        progress_bar=False,
    ).fit()
    return optimizer.judged(case)


def collate(rows: Any, pad: int) -> Batch:
    batch = collate_counted(rows, pad)
    del batch["step_tokens"]
    return batch


def scored(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


def deepspeed(case: Case, rank: int, stage: int, counted: bool) -> list[Tensor]:
    """The loss is the mean of the micro-batch or, if `counted`, sum × W × K / N."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    own_group()
    # It would compile an operator for ranks that share memory.
    with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
        deepspeed.init_distributed("gloo", dist_init_required=False)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    settings = {
        "train_micro_batch_size_per_gpu": case.size,
        "gradient_accumulation_steps": case.steps,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    steps = []
    for batch in loader(case, rank):
        own, all_ = max(1, scored(batch)), int(batch["step_tokens"])
        factor = case.world * case.steps / all_ if counted else 1 / own
        engine.backward(losses(engine, batch).sum() * factor)
        if engine.is_gradient_accumulation_boundary():
            steps.append([safe_get_full_grad(p).clone() for p in net.parameters()])
        engine.step()
    if len(steps) != case.windows:
        raise NoStepError(f"{len(steps)} steps were taken, not {case.windows}")
    return steps[case.judged]
