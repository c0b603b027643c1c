"""torchtune's recipe, litgpt's `fit`, and losses of Axolotl and ms-swift, each alone."""

import importlib
import runpy
from importlib.metadata import distribution
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from surveys.trainers.cases import LONGEST, Case
from surveys.trainers.hugging_face import trainer
from surveys.trainers.plain import own_group
from surveys.trainers.tiny import IGNORED, Watched, loader, model

CHUNKS = 8  # of the logits, along the tokens


def torchtune_recipe(case: Case, rank: int) -> list[Tensor]:
    """`train` of the recipe full_finetune_distributed, on an object that has only what it reads.

    The model is wrapped by DDP instead of FSDP2. Both average.
    """
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    own_group()
    net = DistributedDataParallel(model())
    optimizer = Watched(net)

    def chunks(tokens: Tensor, mask: Tensor) -> list[Tensor]:
        return list(net(input_ids=tokens, attention_mask=mask).logits.chunk(CHUNKS, dim=1))

    names = {"tokens": "input_ids", "mask": "attention_mask", "labels": "labels"}
    renamed = ({to: batch[name] for to, name in names.items()} for batch in loader(case, rank))
    batches = mock.MagicMock()
    batches.__iter__.return_value = renamed
    recipe = mock.MagicMock(
        _model=mock.MagicMock(side_effect=chunks, parameters=net.parameters),
        _optimizer=optimizer,
        _dataloader=batches,
        _loss_fn=CEWithChunkedOutputLoss(CHUNKS),
        _device=torch.device("cpu"),
        ignore_labels_cache=torch.full((case.size, 1), IGNORED),
        _gradient_accumulation_steps=case.steps,
        world_size=case.world,
        total_epochs=1,
        _log_every_n_steps=10**9,
        **dict.fromkeys(("max_steps_per_epoch", "_clip_grad_norm", "_lr_scheduler")),
        **dict.fromkeys(("_optimizer_in_bwd", "_is_rank_zero", "epochs_run", "global_step"), 0),
    )
    file = distribution("torchtune").locate_file("recipes/full_finetune_distributed.py")
    train = runpy.run_path(str(file))["FullFinetuneRecipeDistributed"].train
    # It empties a cache that torch.cpu does not have.
    with mock.patch("torchtune.training.cleanup_before_training"):
        train(recipe)
    return optimizer.judged(case)


def axolotl_loss(case: Case, rank: int) -> list[Tensor]:
    """transformers' Trainer with Axolotl's chunked cross-entropy, which is not compiled here."""
    chunked = importlib.import_module("axolotl.monkeypatch.loss.chunked")
    net = model()
    net.loss_function = chunked.get_causal_lm_loss(CHUNKS)
    with torch.compiler.set_stance("force_eager"):
        return trainer(case, rank, True, net)


def swift_loss(case: Case, rank: int) -> list[Tensor]:
    """transformers' Trainer with ms-swift's cross-entropy, which takes the count of the step."""
    # It replaces parts of the Trainer, which then asks for this setting.
    loss = importlib.import_module("swift.loss.causal_lm").CustomCrossEntropyLoss(None, None)
    with mock.patch.object(TrainingArguments, "max_epochs", None, create=True):
        return trainer(case, rank, True, compute_loss_func=loss)


class OnlyTokens(nn.Module):
    """From tokens (B, T) to logits. Batches are padded on the right, so no mask is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.config = SimpleNamespace(block_size=LONGEST)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(input_ids=tokens).logits


def litgpt_fit(case: Case, rank: int) -> list[Tensor]:
    """`fit` of its full fine-tuning, with stubs around it. There is no validation."""
    full = importlib.import_module("litgpt.finetune.full")
    strategy = "ddp" if case.world > 1 else "auto"
    fabric = full.L.Fabric(accelerator="cpu", devices=case.world, strategy=strategy)
    fabric.launch()
    net = OnlyTokens()
    watched = Watched(net)
    state = {"iter_num": 0, "step_count": 0, "scheduler": mock.MagicMock()}
    state["model"], state["optimizer"] = fabric.setup(net, watched)
    names = "raw", "raw_plus_prompt_template"
    counts = {"token_counts": {name: torch.zeros(1, dtype=torch.long) for name in names}}
    train = mock.MagicMock(
        max_steps=None, max_seq_length=None, epochs=1, log_interval=10**9, save_interval=None
    )
    train.gradient_accumulation_iters.return_value = case.steps
    evaluated = full.EvalArgs(interval=10**9)
    stubs = dict.fromkeys(("Tokenizer", "ConcatDataset", "validate"), mock.MagicMock())
    stubs["get_longest_seq_length"] = lambda _: (LONGEST, 0)
    loaded = mock.MagicMock()
    loaded.__iter__.side_effect = lambda: (batch | counts for batch in loader(case, rank))
    with mock.patch.multiple(full, **stubs):
        full.fit(
            fabric,
            state,
            loaded,
            mock.MagicMock(),
            case.world,
            False,
            None,
            None,
            train,
            evaluated,
            None,
        )
    return watched.judged(case)
