"""Mask2Former's row once more: a whole model, none of the suite's data, networks, or adapters.

    torchrun --nproc-per-node 2 surveys/trainers/mask2former_alone.py

A small model gets the gradient of six images in one process, then in DDP on two ranks: without
Accelerate's state, with it, and with its `reduce` as a sum; with 7 masks each, then with 9 and 5.
"""

import os
from unittest import mock

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import reduce
from torch.nn.functional import cosine_similarity
from torch.nn.parallel import DistributedDataParallel
from transformers.models.mask2former import modeling_mask2former

COUNTS = (4, 3, 2, 3, 1, 1)  # masks per image
RANK = int(os.environ["RANK"])
torch.manual_seed(7)
widths = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
layers = {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 9, "train_num_points": 50}
stages = {"out_features": [f"stage{n}" for n in (1, 2, 3, 4)], "drop_path_rate": 0.0}
swin = transformers.SwinConfig(embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, **stages)
config = transformers.Mask2FormerConfig(backbone_config=swin, **widths, **layers, num_labels=4)
model = transformers.Mask2FormerForUniversalSegmentation(config)
images, points = torch.randn(6, 3, 64, 64), torch.rand(150, 2)
masks = [(torch.rand(n, 64, 64) < 0.3).float() for n in COUNTS]
classes = [torch.randint(4, (n,)) for n in COUNTS]


def gradients(net: torch.nn.Module, mine: slice) -> list[torch.Tensor]:
    """Of what only mask losses reach, then of all others. Each mask has the same random points."""
    model.zero_grad()
    with mock.patch("torch.rand", lambda n, count, _, **__: points[:count].repeat(n, 1, 1)):
        net(images[mine], masks[mine], classes[mine]).loss.backward()
    grads = [(n, p.grad.flatten()) for n, p in model.named_parameters() if p.grad is not None]
    return [torch.cat([g for n, g in grads if ("mask_embedder" in n) == part]) for part in (1, 0)]


def compare(title: str) -> None:
    for mine in (slice(RANK, None, 2), slice(3 * RANK, 3 * RANK + 3)):
        together = gradients(DistributedDataParallel(model, find_unused_parameters=True), mine)
        count = model.criterion.get_num_masks(classes[mine], device="cpu")
        print(f"{title}: rank {RANK} has {sum(COUNTS[mine])} masks of {sum(COUNTS)}, uses {count}")
        for part, here, one in zip(("mask embedder", "all others"), together, alone, strict=True):
            ratio, cosine = here.norm() / one.norm(), cosine_similarity(here, one, dim=0)
            print(f"  {part}: {ratio:.4f} ∠ {cosine:.4f}")


alone = gradients(model, slice(None))
torch.distributed.init_process_group("gloo")
compare("no Accelerate")
PartialState(cpu=True)
compare("Accelerate")
with mock.patch.object(modeling_mask2former, "reduce", lambda one: reduce(one, "sum")):
    compare("Accelerate, sum")
torch.distributed.destroy_process_group()
