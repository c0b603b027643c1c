"""Mixed precision by the wrapper: compute in a narrow type, step in a wide one.

Before a forward, the data of every floating-point parameter are replaced by a copy in
`param_dtype`, and the inputs are cast too; so activations and gradients are narrow. A bucket
travels in `reduce_dtype`. As soon as it is full, its parameters take their wide data back, and
their gradients become wide, so that an optimizer sees nothing of all this. A forward without
gradients makes them wide again before it returns, if they were wide before. After a forward under
`no_sync`, or one whose backward does not follow, they stay narrow until the next reduced backward:
a graph may still need them. Meanwhile `state_dict()` is narrow, too. Unlike torch.autocast, this
narrows everything, reductions and norms as well.

Cost: for each forward one narrow copy of the parameters, freed during backward. Each rank sends
half the bytes with a type of two bytes.

The settings are those of torch's `_MixedPrecision`: an object with `param_dtype`, `reduce_dtype`
and `buffer_dtype`, each a dtype or None. Two things differ from torch's wrapper: it divides by the
world size before the sum, so that a narrow sum does not overflow, and gradients are never views of
a bucket, which has another type.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from miniddp.autograd_graph import at_end_of_backward
from miniddp.nested import cast


class MixedPrecision:
    """Switches the data of `parameters` between wide and narrow, and reduces narrow buckets."""

    def __init__(self, ddp: Any, settings: Any):
        self.settings = settings
        self.parameters = list(ddp.synced_parameters().values())
        self.ddp = weakref.ref(ddp)
        self.widens_at_end = False
        self.narrow_now: set[nn.Parameter] = set()
        self.was_wide = True  # before the last forward
        for parameter in self.parameters:
            parameter._fp_param = parameter.data
            parameter._mp_param = torch.empty(0, dtype=settings.param_dtype or parameter.dtype)
        for buffer in ddp.synced_buffers().values():
            if buffer.is_floating_point() and settings.buffer_dtype is not None:
                buffer.data = buffer.data.to(settings.buffer_dtype)
            buffer._fp_param = buffer._mp_param = buffer.data

    def narrow(self) -> None:
        """Before a forward: make the parameters narrow, and gradients of earlier backwards."""
        self.was_wide = not self.narrow_now
        for parameter in self.parameters:
            dtype = self.settings.param_dtype or parameter.dtype
            if not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            parameter._fp_param = parameter.data
            parameter._mp_param = parameter.data = parameter.data.to(dtype)
            self.narrow_now.add(parameter)
            if parameter.grad is not None and torch.is_grad_enabled():
                parameter.grad.data = parameter.grad.to(dtype)
        self.widens_at_end = False
        if torch.is_grad_enabled():
            # Data of another type have another gradient accumulator.
            reducer = self.ddp().reducer
            reducer.remove_hooks()
            reducer.hook_accumulators()

    def cast(self, inputs: Any) -> Any:
        """`inputs`, however nested, with every floating-point tensor narrow."""
        return cast(inputs, self.settings.param_dtype)

    def widen(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Give `parameters` (all of them when None) their wide data back, and a wide gradient."""
        for parameter in self.parameters if parameters is None else parameters:
            if parameter in self.narrow_now:  # the data of others may be the user's by now
                self.narrow_now.remove(parameter)
                parameter.data = parameter._fp_param
                parameter._mp_param = parameter._mp_param.new_empty(0)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)

    def reduce(self, state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """A comm hook: the average, sent in `reduce_dtype`; widens the bucket's parameters."""
        ddp, buffer = self.ddp(), bucket.buffer()
        if ddp.reducer.expects_gradients():  # otherwise this rank has joined and answers the others
            if not self.widens_at_end:
                self.widens_at_end = True
                at_end_of_backward(self.widen)
            self.widen(bucket.parameters())
        buffer.div_(ddp.reducer.contributors())
        dtype = self.settings.reduce_dtype or self.settings.param_dtype or buffer.dtype
        sent = buffer.to(dtype) if buffer.is_floating_point() else buffer
        work = dist.all_reduce(sent, group=ddp.process_group, async_op=True)
        return work.get_future().then(lambda _: buffer.copy_(sent))
