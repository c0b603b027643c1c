"""The broken rows of detection once more: whole models, none of the suite's data or adapters.

    torchrun --nproc-per-node 2 surveys/trainers/detr_alone.py Detr

or DeformableDetr, or Mask2Former without its classification loss, with all random points in the
middle. A small model of transformers gets the gradient of six random images in one process; then,
under Accelerate, of the same images, an equal number on each rank. It needs transformers,
accelerate, scipy, and pillow.
"""

import sys

import accelerate
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cosine_similarity


def gradient(model: torch.nn.Module, own: slice) -> list[Tensor]:
    """Of the parameters in the heads that predict boxes or masks, then of all others."""
    of: dict[str, list[Tensor]] = {one: [each[one] for each in labels[own]] for one in labels[0]}
    given = of if "mask_labels" in of else {"labels": labels[own]}
    model.zero_grad()
    model(pixel_values=images[own], **given).loss.sum().backward()
    grads = {n: p.grad.flatten() for n, p in model.named_parameters() if p.grad is not None}
    heads = [n for n in grads if "bbox" in n or "mask_embedder" in n]
    return [torch.cat([g for n, g in grads.items() if (n in heads) == part]) for part in (1, 0)]


def masks() -> transformers.Mask2FormerConfig:
    torch.rand = lambda *size, **_: torch.full(size, 0.5)  # type: ignore[assignment]
    names = ("feature_size", "mask_feature_size", "hidden_dim", "dim_feedforward")
    options = dict.fromkeys((*names, "encoder_feedforward_dim"), 32)
    options |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2}
    options |= {"num_queries": 12, "num_labels": 5, "train_num_points": 16}
    swin = {"embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4, "window_size": 2}
    names = ["stage1", "stage2", "stage3", "stage4"]
    backbone = transformers.SwinConfig(**swin, drop_path_rate=0.0, out_features=names)
    return transformers.Mask2FormerConfig(backbone, **options, dropout=0.0, class_weight=0.0)


name = sys.argv[1]
options = {"d_model": 64, "num_labels": 5, "num_queries": 12, "dropout": 0.0}
for part in ("encoder", "decoder"):
    options |= {f"{part}_layers": 2, f"{part}_ffn_dim": 16, f"{part}_attention_heads": 2}
maps = ["stage2", "stage3", "stage4"] if name == "DeformableDetr" else ["stage4"]
backbone = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "out_features": maps}
options["backbone_config"] = transformers.ResNetConfig(layer_type="basic", **backbone)
torch.manual_seed(3)
if name == "Mask2Former":
    model = transformers.Mask2FormerForUniversalSegmentation(masks())
else:
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForObjectDetection")(config)
images = torch.randn(6, 3, 64, 64)
labels = [
    {"class_labels": torch.randint(5, (n,)), "boxes": 0.3 + 0.3 * torch.rand(n, 4)}
    for n in (5, 2, 3, 4, 7, 1)
]
if name == "Mask2Former":
    for one in labels:
        one["mask_labels"] = torch.randn(len(one.pop("boxes")), 64, 64).gt(0).float()
alone = gradient(model, slice(None))
state = accelerate.Accelerator(cpu=True)
mine = slice(state.process_index, None, state.num_processes)
together = gradient(state.prepare(model), mine)
for part, mine_of, one in zip(("heads", "all others"), together, alone, strict=True):
    ratio, cosine = mine_of.norm() / one.norm(), cosine_similarity(mine_of, one, dim=0)
    state.print(f"{name}, {state.num_processes} ranks, {part}: {ratio:.4f} ∠ {cosine:.4f}")
