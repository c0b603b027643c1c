"""Mixed precision by the wrapper: compute in a type of low precision, step in full precision.

Before a forward, the data of every floating-point parameter are replaced by a copy in
`param_dtype`, and the inputs are cast too; so activations and gradients have that type. A bucket
is sent in `reduce_dtype`. As soon as it is full, its parameters get their full-precision data back,
and their gradients are cast, so that an optimizer sees only full precision. A forward without
gradients restores it before it returns, if the parameters had it before. After a forward under
`no_sync`, or one whose backward does not follow, they stay in low precision until the next reduced
backward: a graph may still need them. Meanwhile `state_dict()` is in low precision, too. Unlike
torch.autocast, this casts everything, reductions and norms as well.

Cost: for each forward one low-precision copy of the parameters, freed during backward. Each rank
sends half the bytes with a type of two bytes.

The settings are those of torch's `_MixedPrecision`: an object with `param_dtype`, `reduce_dtype`
and `buffer_dtype`, each a dtype or None. Two things differ from torch's wrapper: it divides by the
world size before the sum, so that a sum in low precision does not overflow, and gradients are never
views of a bucket, which has another type.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from miniddp.autograd_graph import at_end_of_backward
from miniddp.nested import cast_floating


class MixedPrecision:
    """Switches parameters between low and full precision, and reduces buckets in low precision."""

    def __init__(self, ddp: Any, settings: Any):
        self.settings = settings
        self.parameters = list(ddp.synced_parameters().values())
        self.ddp = weakref.ref(ddp)
        self.restores_at_end = False
        self.in_low_precision: set[nn.Parameter] = set()
        self.was_full = True  # before the last forward
        for parameter in self.parameters:
            parameter._fp_param = parameter.data
            parameter._mp_param = torch.empty(0, dtype=settings.param_dtype or parameter.dtype)
        for buffer in ddp.synced_buffers().values():
            if buffer.is_floating_point() and settings.buffer_dtype is not None:
                buffer.data = buffer.data.to(settings.buffer_dtype)
            buffer._fp_param = buffer._mp_param = buffer.data

    def use_low_precision(self) -> None:
        """Before a forward: cast the parameters, and gradients of earlier backwards."""
        self.was_full = not self.in_low_precision
        for parameter in self.parameters:
            dtype = self.settings.param_dtype or parameter.dtype
            if not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            parameter._fp_param = parameter.data
            parameter._mp_param = parameter.data = parameter.data.to(dtype)
            self.in_low_precision.add(parameter)
            if parameter.grad is not None and torch.is_grad_enabled():
                parameter.grad.data = parameter.grad.to(dtype)
        self.restores_at_end = False
        if torch.is_grad_enabled():
            # Data of another type have another gradient accumulator.
            reducer = self.ddp().reducer
            reducer.remove_hooks()
            reducer.hook_accumulators()

    def cast(self, inputs: Any) -> Any:
        """`inputs`, however nested, with every floating-point tensor in `param_dtype`."""
        return cast_floating(inputs, self.settings.param_dtype)

    def restore_full_precision(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Give `parameters` (all of them when None) their data back, and cast their gradients."""
        for parameter in self.parameters if parameters is None else parameters:
            if parameter in self.in_low_precision:  # the data of others may be the user's by now
                self.in_low_precision.remove(parameter)
                parameter.data = parameter._fp_param
                parameter._mp_param = parameter._mp_param.new_empty(0)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)

    def reduce(self, state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """A comm hook: the average, sent in `reduce_dtype`; restores the bucket's parameters."""
        ddp, buffer = self.ddp(), bucket.buffer()
        if ddp.reducer.expects_gradients():  # otherwise this rank has joined and answers the others
            if not self.restores_at_end:
                self.restores_at_end = True
                at_end_of_backward(self.restore_full_precision)
            self.restore_full_precision(bucket.parameters())
        buffer.div_(ddp.reducer.contributors())
        dtype = self.settings.reduce_dtype or self.settings.param_dtype or buffer.dtype
        sent = buffer.to(dtype) if buffer.is_floating_point() else buffer
        work = dist.all_reduce(sent, group=ddp.process_group, async_op=True)
        return work.get_future().then(lambda _: buffer.copy_(sent))
