"""The broken row of an encoder-decoder once more: none of the suite's data, networks, or adapters.

    torchrun --nproc-per-node 2 surveys/trainers/captioner_alone.py

transformers' Trainer takes one step of SGD on 8 random images with captions of equal length, so all
micro-batches have equal counts. Its change of the weights is compared with one backward on all 8.
"""

import os
import tempfile
from typing import Any

import torch
import transformers
from torch.nn.functional import cosine_similarity
from torch.nn.utils import parameters_to_vector as vector

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
model = transformers.VisionEncoderDecoderModel(config)
images, labels = torch.randn(8, 3, 16, 16), torch.randint(2, 50, (8, 6))
rows = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]

model(pixel_values=images, labels=labels).loss.backward()
alone = vector(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
model.zero_grad()
before = vector(model.parameters()).detach().clone()
given: dict[str, Any] = {"per_device_train_batch_size": 8 // STEPS // WORLD}
given |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "max_steps": 1}
given |= {"gradient_accumulation_steps": STEPS, "max_grad_norm": 0, "disable_tqdm": True}
given |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
with tempfile.TemporaryDirectory() as folder:
    options = transformers.TrainingArguments(folder, **given)
    trainer = transformers.Trainer(model, options, train_dataset=rows)
    trainer.train()
after = vector(trainer.accelerator.unwrap_model(model).parameters()).detach()
ratio = (before - after).norm() / alone.norm()
cosine = cosine_similarity(before - after, alone, dim=0)
print(f"{WORLD} ranks, {STEPS} micro-batches each: {ratio:.4f} ∠ {cosine:.4f}")
