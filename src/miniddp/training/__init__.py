"""What a training loop needs besides the wrapper: losses, SyncBatchNorm, MiniDataParallel."""

from miniddp.training.data_parallel import MiniDataParallel
from miniddp.training.losses import (
    accumulation_windows,
    global_mean,
    loss_scale,
    token_cross_entropy,
)
from miniddp.training.sync_batch_norm import SyncBatchNorm

__all__ = [
    "MiniDataParallel",
    "SyncBatchNorm",
    "accumulation_windows",
    "global_mean",
    "loss_scale",
    "token_cross_entropy",
]
