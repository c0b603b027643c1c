"""A wrapper with a fault, to see that PyTorch's tests, run through this harness, reject it."""

from typing import Any

from torch.nn.parallel.distributed import DistributedDataParallel


class Unsynchronized(DistributedDataParallel):
    """Never averages: every forward is one under `no_sync`."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*inputs, **kwargs)
