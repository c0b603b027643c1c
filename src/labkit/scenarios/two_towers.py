"""A tiny CLIP: two linear encoders onto the unit sphere, and a learned temperature."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoTowers(nn.Module):
    """Images (n, 5) and captions (n, 4) → two sets of unit vectors (n, 6), and the temperature.

    The temperature is the only parameter without dimensions, which is how its gradient is told
    from the encoders' gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.image, self.caption = nn.Linear(5, 6), nn.Linear(4, 6)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return image vectors, caption vectors, and the temperature that multiplies scores."""
        image = F.normalize(self.image(images), dim=1)
        caption = F.normalize(self.caption(captions), dim=1)
        return image, caption, self.temperature
