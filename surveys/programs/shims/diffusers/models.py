"""An encoder with the shapes of Stable Diffusion's, and nothing learned."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional


class AutoencoderKL(nn.Module):
    """Latents (batch, 4, height / 8, width / 8): means of 8 × 8 pixels, and their mean."""

    @classmethod
    def from_pretrained(cls, name: str) -> "AutoencoderKL":
        return cls()

    def encode(self, images: torch.Tensor) -> SimpleNamespace:
        colors = functional.avg_pool2d(images, 8)
        latents = torch.cat([colors, colors.mean(1, keepdim=True)], 1)
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: latents))
