"""The two broken rows once more: whole models, none of the suite's data, networks, or adapters.

    torchrun --nproc-per-node 2 surveys/trainers/detr_alone.py Detr
    torchrun --nproc-per-node 2 surveys/trainers/detr_alone.py DeformableDetr

A small model of transformers gets the gradient of six random images in one process; then, under
Accelerate, of the same images, an equal number on each rank. It needs transformers, accelerate, and
scipy.
"""

import sys

import accelerate
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cosine_similarity


def gradient(
    model: torch.nn.Module, images: Tensor, labels: list[dict[str, Tensor]]
) -> list[Tensor]:
    """Of the parameters in the heads that predict boxes, then of all others: two vectors."""
    model.zero_grad()
    model(pixel_values=images, labels=labels).loss.backward()
    grads = {n: p.grad.flatten() for n, p in model.named_parameters() if p.grad is not None}
    return [torch.cat([g for n, g in grads.items() if ("bbox" in n) == part]) for part in (1, 0)]


name = sys.argv[1]
options = {"d_model": 64, "num_labels": 5, "num_queries": 12, "dropout": 0.0}
for part in ("encoder", "decoder"):
    options |= {f"{part}_layers": 2, f"{part}_ffn_dim": 16, f"{part}_attention_heads": 2}
maps = ["stage2", "stage3", "stage4"] if name == "DeformableDetr" else ["stage4"]
backbone = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "out_features": maps}
options["backbone_config"] = transformers.ResNetConfig(layer_type="basic", **backbone)
torch.manual_seed(3)
config = getattr(transformers, f"{name}Config")(**options)
model = getattr(transformers, f"{name}ForObjectDetection")(config)
images = torch.randn(6, 3, 64, 64)
labels = [
    {"class_labels": torch.randint(5, (n,)), "boxes": 0.3 + 0.3 * torch.rand(n, 4)}
    for n in (5, 2, 3, 4, 7, 1)
]
alone = gradient(model, images, labels)
state = accelerate.Accelerator(cpu=True)
mine = slice(state.process_index, None, state.num_processes)
together = gradient(state.prepare(model), images[mine], labels[mine])
for part, mine_of, one in zip(("heads for boxes", "all others"), together, alone, strict=True):
    ratio, cosine = mine_of.norm() / one.norm(), cosine_similarity(mine_of, one, dim=0)
    state.print(f"{name}, {state.num_processes} ranks, {part}: {ratio:.4f} ∠ {cosine:.4f}")
