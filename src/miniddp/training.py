"""The former name of `losses`, `sync_batch_norm`, and `data_parallel`, for one more release."""

import sys
import warnings

from miniddp import data_parallel, losses, sync_batch_norm
from miniddp.data_parallel import MiniDataParallel
from miniddp.losses import accumulation_windows, global_mean, loss_scale, token_cross_entropy
from miniddp.sync_batch_norm import SyncBatchNorm

__all__ = [
    "MiniDataParallel",
    "SyncBatchNorm",
    "accumulation_windows",
    "global_mean",
    "loss_scale",
    "token_cross_entropy",
]

warnings.warn(
    "miniddp.training will be removed: import from miniddp.losses, miniddp.sync_batch_norm, or "
    "miniddp.data_parallel",
    DeprecationWarning,
    stacklevel=2,
)
# `import miniddp.training.losses` finds them here.
for _module in (data_parallel, losses, sync_batch_norm):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
