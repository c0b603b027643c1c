"""The broken row of an encoder-decoder once more: none of the suite's data, networks, or adapters.

    torchrun --nproc-per-node 2 surveys/trainers/captioner_alone.py

transformers' Trainer takes one step of SGD on 8 random images, with captions of equal length, then
of unequal ones. Its change of the weights is compared with one backward on all 8, without a fix and
with two.
"""

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.nn.utils import parameters_to_vector as vector
from transformers.models.encoder_decoder.modeling_encoder_decoder import shift_tokens_right

STEPS = 2  # micro-batches per rank
WORLD = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(3)
drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
words = {"bos_token_id": 1, "eos_token_id": 1, "add_cross_attention": True}
decoder = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, **drops, **words)
sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
encoder = transformers.ViTConfig(**sizes, intermediate_size=48, image_size=16, patch_size=8)
config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
config.pad_token_id, config.decoder_start_token_id = 0, 1
untrained = transformers.VisionEncoderDecoderModel(config)
images, equal = torch.randn(8, 3, 16, 16), torch.randint(2, 50, (8, 6))
unequal = torch.where(
    torch.arange(6) < torch.tensor([1, 6, 2, 5, 3, 3, 6, 1])[:, None], equal, -100
)


def token_mean(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    logits = outputs["logits"].flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def compare(
    title: str, labels: Tensor, flag: bool | None, loss: Callable[..., Tensor] | None
) -> None:
    """Print the step's ratio to one backward on all images, and the cosine."""
    model = copy.deepcopy(untrained)
    model(pixel_values=images, labels=labels).loss.backward()
    grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
    alone, before = vector(grads), vector(model.parameters()).detach().clone()
    model.zero_grad()
    columns = {"pixel_values": images, "labels": labels}
    if flag is not None:
        model.accepts_loss_kwargs = flag
    if (
        loss is not None
    ):  # the Trainer then takes the labels from the batch, so the model needs these
        columns["decoder_input_ids"] = shift_tokens_right(labels, 0, 1)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    given: dict[str, Any] = {"per_device_train_batch_size": 8 // STEPS // WORLD}
    given |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "max_steps": 1}
    given |= {"gradient_accumulation_steps": STEPS, "max_grad_norm": 0, "disable_tqdm": True}
    given |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(folder, **given)
        trainer = transformers.Trainer(model, options, train_dataset=rows, compute_loss_func=loss)
        trainer.train()
    step = before - vector(trainer.accelerator.unwrap_model(model).parameters()).detach()
    ratio, cosine = step.norm() / alone.norm(), cosine_similarity(step, alone, dim=0)
    print(f"{WORLD} ranks, {STEPS} micro-batches each, {title}: {ratio:.4f} ∠ {cosine:.4f}")


for lengths, labels in (("equal", equal), ("unequal", unequal)):
    compare(f"{lengths} captions", labels, None, None)
    compare(f"{lengths} captions, accepts_loss_kwargs = False", labels, False, None)
    compare(f"{lengths} captions, compute_loss_func", labels, None, token_mean)
