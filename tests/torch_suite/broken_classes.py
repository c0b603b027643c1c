"""Two wrappers with a fault, to see that PyTorch's tests, run through this harness, reject them."""

import time
from typing import Any

from torch.nn.parallel.distributed import DistributedDataParallel


class Unsynchronized(DistributedDataParallel):
    """Never averages: every forward is one under `no_sync`."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*inputs, **kwargs)


class Hanging(DistributedDataParallel):
    """Does not come back from its forward."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        time.sleep(3600)
