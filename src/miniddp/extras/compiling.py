"""Where `torch.compile` has to stop: the wrapper's own work runs as it is written.

Compiling a wrapped module means compiling the module. What the wrapper does around it, broadcasts,
the arming of the reducer, clocks, has effects that a traced graph would not repeat, so Dynamo is
told to leave it alone. Inside the module it may ask which wrapper is active: it then splits the
module's graph at the buckets' caps, as without the split all gradients would arrive at once, at the
very end of backward, and nothing could overlap.

Cost: none until the first forward, which loads Dynamo if no optimizer has done so.

Source: torch/nn/parallel/distributed.py (_inside_ddp_forward), torch/_dynamo/convert_frame.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

# The public torch.compiler.disable loads Dynamo when the decorated function is defined: a second
# for each `import miniddp`. This one, which torch's optimizers use, waits for the first call.
_disable = torch._disable_dynamo


def not_compiled(function: Callable) -> Callable:
    """`function`, and all that it calls, run as written also in a compiled model."""
    return _disable(function)


def not_compiled_itself(function: Callable) -> Callable:
    """`function` runs as written; what it calls may be compiled."""
    return _disable(function, recursive=False)


def active_wrapper() -> Any:
    """The wrapper whose forward is running, of whichever class; None outside of one."""
    return DistributedDataParallel._active_ddp_module


@contextmanager
@not_compiled_itself
def active(wrapper: Any) -> Iterator[None]:
    """Let Dynamo know in whose forward a module runs, and whose caps its graph is split by."""
    outer = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = wrapper
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = outer
