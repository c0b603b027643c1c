"""General loops: the loss is the mean over the samples of a micro-batch, as users write it.

Every sample's loss is its own token mean, so micro-batches of equal size have equal counts.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from surveys.trainers.cases import PAD, Case
from surveys.trainers.plain import own_group
from surveys.trainers.tiny import (
    IGNORED,
    NoStepError,
    Watched,
    collate,
    loader,
    losses,
    model,
    trained,
)

Batch = dict[str, Tensor]


class SampleLosses(nn.Module):
    """From a batch to the loss of each sample, (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, batch: Batch) -> Tensor:
        counts = (batch["labels"] != IGNORED).sum(1).clamp(min=1)
        return losses(self.net, batch).sum(1) / counts


def pairs(case: Case, rank: int) -> DataLoader:
    """Batches, each with targets that no loss reads."""
    return DataLoader(case.own(rank), case.size, collate_fn=partial(with_targets, pad=case.pad))


def with_targets(rows: Sequence[Any], pad: int) -> tuple[Batch, Tensor]:
    return collate(rows, pad), torch.zeros(len(rows))


def parallel(case: Case, net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net) if case.world > 1 else net


def plain(case: Case, rank: int) -> list[Tensor]:
    """Every micro-batch's mean over K: the loop of many tutorials."""
    batches = loader(case, rank)
    return trained(case, SampleLosses(), batches, lambda net, one: net(one).mean() / case.steps)


def accelerate_accumulate(case: Case, rank: int) -> list[Tensor]:
    """The short loop of its guide, with `accelerator.accumulate`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.steps)
    net = SampleLosses()
    watched = Watched(net)
    batches = DataLoader([one._asdict() for one in case.samples], case.size, collate_fn=collate)
    net, optimizer, batches = accelerator.prepare(net, watched, batches)
    for batch in batches:
        with accelerator.accumulate(net):
            accelerator.backward(net(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    return watched.judged(case)


def ignite(case: Case, rank: int) -> list[Tensor]:
    from ignite.engine import create_supervised_trainer

    net = SampleLosses()
    watched = Watched(net)
    engine = create_supervised_trainer(
        parallel(case, net),
        watched,
        lambda found, _: found.mean(),
        prepare_batch=lambda batch, **_: (batch, None),
        gradient_accumulation_steps=case.steps,
    )
    engine.run(loader(case, rank), max_epochs=1)
    return watched.judged(case)


def monai(case: Case, rank: int) -> list[Tensor]:
    from monai.engines import SupervisedTrainer

    net = SampleLosses()
    watched = Watched(net)
    SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=loader(case, rank),
        network=parallel(case, net),
        optimizer=watched,
        loss_function=lambda found, _: found.mean(),
        prepare_batch=lambda batch, *_, **__: (batch, None),
    ).run()
    return watched.judged(case)


def skorch(case: Case, rank: int) -> list[Tensor]:
    """As in its FAQ: get_loss divides by K, and train_step steps at every K-th batch."""
    from skorch import NeuralNet

    class Keywords(SampleLosses):
        def forward(self, **batch: Tensor) -> Tensor:
            return super().forward(batch)

    class Accumulating(NeuralNet):
        def get_iterator(self, *_: Any, **__: Any) -> DataLoader:
            return pairs(case, rank)

        def get_loss(self, y_pred: Tensor, *_: Any, **__: Any) -> Tensor:
            return y_pred.mean() / case.steps

        def train_step(self, batch: Any, **parameters: Any) -> Any:
            step = self.train_step_single(batch, **parameters)
            if len(self.history[-1, "batches"]) % case.steps == 0:
                self.optimizer_.step()
                self.optimizer_.zero_grad()
            return step

    net = Keywords()
    watched = Watched(net)
    Accumulating(
        parallel(case, net),
        nn.MSELoss,
        optimizer=lambda *_, **__: watched,
        max_epochs=1,
        train_split=None,
        callbacks=None,
        verbose=0,
    ).fit(case.own(rank), None)
    return watched.judged(case)


def speechbrain(case: Case, rank: int) -> list[Tensor]:
    from speechbrain import Brain

    own_group()  # where a launcher's variables are set, it asks for a group of one rank, too

    class Own(Brain):
        def compute_forward(self, batch: Batch, stage: Any) -> Tensor:
            return self.modules.net(batch)

        def compute_objectives(self, predictions: Tensor, batch: Batch, stage: Any) -> Tensor:
            return predictions.mean()

    net = SampleLosses()
    watched = Watched(net)
    options = {
        "device": "cpu",
        "grad_accumulation_factor": case.steps,
        "max_grad_norm": float("inf"),
        "distributed_launch": case.world > 1,
        "distributed_backend": "gloo",
    }
    own = Own({"net": net}, lambda _: watched, run_opts=options)
    own.fit(range(1), loader(case, rank), progressbar=False)
    return watched.judged(case)


def mmengine(case: Case, rank: int) -> list[Tensor]:
    """`train_step` of its models, as its loops call it."""
    from mmengine.model import BaseModel, MMDistributedDataParallel
    from mmengine.optim import OptimWrapper

    class Own(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = SampleLosses()

        def forward(self, batch: Batch, mode: str = "loss") -> dict[str, Tensor]:
            return {"loss": self.net(batch).mean()}

    net = Own()
    watched = Watched(net)
    wrapper = OptimWrapper(watched, accumulative_counts=case.steps)
    batches = loader(case, rank)
    trained = MMDistributedDataParallel(net) if case.world > 1 else net
    wrapper.initialize_count_status(trained, 0, len(batches))
    for batch in batches:
        trained.train_step({"batch": batch}, wrapper)
    return watched.judged(case)


def fastai(case: Case, rank: int) -> list[Tensor]:
    """`n_acc` counts samples."""
    from fastai.callback.training import GradientAccumulation
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    net = SampleLosses()
    watched = Watched(net)
    learner = Learner(
        DataLoaders(pairs(case, rank), []),
        parallel(case, net),
        loss_func=lambda found, _: found.mean(),
        opt_func=lambda *_, **__: OptimWrapper(opt=watched),
        cbs=[GradientAccumulation(case.steps * case.size)],
        train_bn=False,
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)
    return watched.judged(case)


def keras(case: Case, rank: int) -> list[Tensor]:
    """`fit` on torch. For several ranks, its guide asks for a loop of one's own."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    seen = []

    class Keeps(keras.optimizers.SGD):
        def _backend_update_step(self, grads: list[Tensor], *_: Any) -> None:
            seen.append([of.clone() for of in grads])

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = keras.layers.TorchModuleWrapper(SampleLosses())

        def call(self, tokens: Tensor, training: bool = False) -> Tensor:
            inputs, labels = tokens.unbind(2)
            mask = (inputs != PAD).long()
            return self.net({"input_ids": inputs, "attention_mask": mask, "labels": labels})

    net = Own()
    net.compile(
        optimizer=Keeps(0.0, gradient_accumulation_steps=case.steps),
        loss=lambda _, found: found,
    )
    batches = DataLoader(case.own(rank), case.size, collate_fn=stacked)
    net.fit(batches, shuffle=False, verbose=0)
    if len(seen) != case.windows:
        raise NoStepError(f"{len(seen)} steps were taken, not {case.windows}")
    return seen[case.judged]


def stacked(rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Tokens and labels in one tensor (B, T, 2), and targets that no loss reads."""
    batch = collate(rows)
    return torch.stack([batch["input_ids"], batch["labels"]], 2), torch.zeros(len(rows))
