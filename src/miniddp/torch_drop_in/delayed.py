"""Parameters that are reduced late, by one all-reduce, once another parameter has its gradient.

The keywords `delay_all_reduce_named_params` and `param_to_hook_all_reduce` ask for it. Cost: one
all-reduce of the delayed parameters' bytes per backward, and no copy.
"""

import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from miniddp.bucket import Bucket
from miniddp.replicas import broadcast_tensors
from miniddp.torch_drop_in.torch_reducer import TorchReducer


class DelayedAllReduce:
    """One flat buffer of gradients, reduced when the gradient of `trigger` is ready.

    Args:
        parameters: their values are broadcast from rank 0 here.
        trigger: a parameter that is reduced in its turn.
        reducer: that of the wrapper. It awaits the all-reduce at the end of the backward.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], trigger: Tensor, reducer: TorchReducer):
        broadcast_tensors(parameters, reducer.process_group, 0)
        bucket = self.bucket = Bucket(range(len(parameters)), parameters, as_views=True)
        this = weakref.ref(reducer)

        def reduce(gradient: Tensor) -> None:
            reducer = this()
            if reducer is not None and reducer.expects_gradients():
                bucket.copy_in(reducer.process_group.size())
                work = dist.all_reduce(bucket.buffer, group=reducer.process_group, async_op=True)
                reducer.extra_futures.append(work.get_future())

        handle = trigger.register_hook(reduce)
        weakref.finalize(self, handle.remove).atexit = False

    def set_missing_gradients(self) -> None:
        """Let each missing gradient be a view of the buffer: at the end of each forward."""
        for parameter, view in zip(self.bucket.parameters, self.bucket.views, strict=True):
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view
