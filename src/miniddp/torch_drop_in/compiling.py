"""Which wrapper is active: torch.compile splits a module's graph at its wrapper's bucket caps.

Without the split, all gradients of a compiled module would arrive at the very end of backward, and
nothing could overlap. Dynamo asks torch's wrapper class for the active instance, so this file sets
that attribute; there is no public way.

Source: torch/nn/parallel/distributed.py (_inside_ddp_forward), torch/_dynamo/convert_frame.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from miniddp.ddp import disable_dynamo


def active_wrapper() -> Any:
    """The wrapper whose forward is running, of whichever class; None outside of one."""
    return DistributedDataParallel._active_ddp_module


@contextmanager
@partial(disable_dynamo, recursive=False)
def active(wrapper: Any) -> Iterator[None]:
    """Tell Dynamo which wrapper's forward is running."""
    outer = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = wrapper
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = outer
