"""Made-up images."""

from typing import Any

import torch
from torch.utils.data import Dataset


class FakeData(Dataset[Any]):
    """64 random images of 8 × 8 pixels, whatever is asked for."""

    def __init__(self, size: int = 64, *args: Any) -> None:
        seeded = torch.Generator().manual_seed(0)
        self.images = torch.randn(64, 3, 8, 8, generator=seeded)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], index % 10


ImageFolder = FakeData
