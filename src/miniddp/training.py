"""The former name of `losses`, `sync_batch_norm`, and `data_parallel`, for one more release."""

import sys
import warnings

from miniddp import data_parallel, losses, sync_batch_norm

warnings.warn(
    "miniddp.training will be removed: import from miniddp.losses, miniddp.sync_batch_norm, or "
    "miniddp.data_parallel",
    DeprecationWarning,
    stacklevel=2,
)
for _module in (data_parallel, losses, sync_batch_norm):
    globals().update({name: value for name, value in vars(_module).items() if name[0] != "_"})
    # `import miniddp.training.losses` finds it here.
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
