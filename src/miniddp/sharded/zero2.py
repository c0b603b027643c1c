"""ZeRO-2: as ZeRO-1, and each rank also keeps only its 1/W of the gradients.

    model = Zero2(module)
    optimizer = Zero2Optimizer(model, torch.optim.AdamW, lr=1e-3)

The core's reducer launches bucket after bucket while backward runs. Here a bucket is reduce-
scattered: rank r receives the average of the bucket's r-th slice, and the whole gradients are
freed. Which rank owns what must not change, so the buckets are planned at once and never rebuilt.

Cost for Ψ bytes of parameters: (W−1)/W·Ψ sent during backward, and as many by `step`: together
those of DDP. Memory: gradients and state of Ψ/W, and two buckets. Source: Rajbhandari et al., SC
2020.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from miniddp.bucket import Bucket
from miniddp.comm import wait_for
from miniddp.ddp import MiniDDP
from miniddp.reducer import Reducer
from miniddp.sharded.sharding import reduce_scatter_single
from miniddp.sharded.slices import Slices
from miniddp.sharded.zero1 import ZeroRedundancyOptimizer


class SlicedBucket(Bucket):
    """A bucket of which this rank keeps one slice."""

    def __init__(
        self, indices: Sequence[int], parameters: Sequence[Tensor], group: dist.ProcessGroup
    ):
        self.slices = Slices(parameters, group)
        super().__init__(indices, parameters)

    def allocate(self) -> None:
        super().allocate()
        whole = self.buffer.new_zeros(self.slices.size * self.slices.group.size())
        self.views = [whole.as_strided(v.shape, v.stride(), v.storage_offset()) for v in self.views]
        self.buffer = whole
        self.free()

    def free(self) -> None:
        """Give the buffer's memory back until the next `copy_in`."""
        self.buffer.untyped_storage().resize_(0)

    def copy_in(self, divisor: int) -> None:
        """As in the core; afterwards the parameters have no gradients."""
        self.buffer.untyped_storage().resize_(self.buffer.nbytes)
        super().copy_in(divisor)
        for parameter in self.parameters:
            parameter.grad = None

    def reduce_scatter(self) -> None:
        """Launch the sum of each rank's slice."""
        self.own = self.buffer.new_empty(self.slices.size)
        self.buffer[self.offsets[-1] :] = 0
        self.work: dist.Work | None = reduce_scatter_single(
            self.own, self.buffer, group=self.slices.group, async_op=True
        )
        # It says to the reducer that the bucket is launched; gloo has none for a reduce-scatter.
        self.future = Future()

    def wait(self) -> None:
        """Wait for the slice, and free the rest."""
        if self.work is not None:
            wait_for(self.work)
            self.work = None
            self.free()

    @torch.no_grad()
    def copy_out(self, slots: Sequence[int]) -> list[int]:
        """Add the averages to the gradients of the pieces that belong to `slots`."""
        wanted, offset = set(slots), 0
        for piece in self.slices.pieces:
            average = self.own[offset : offset + piece.shard.numel()]
            offset += piece.shard.numel()
            if piece.index in wanted:
                grad = piece.shard.grad
                piece.shard.grad = average if grad is None else grad.add_(average)
        return []


class Zero2Reducer(Reducer):
    """Reduce-scatters each bucket, and frees it as soon as the next one is launched."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **(kwargs | {"plan_at_once": True}))

    def make_bucket(self, indices: list[int]) -> SlicedBucket:
        if self.gradient_as_bucket_view:
            raise ValueError("Zero2 keeps no gradients: gradient_as_bucket_view must be False")
        return SlicedBucket(indices, [self.parameters[i] for i in indices], self.process_group)

    def rebuild_buckets(self) -> bool:
        self.ensure_prior_reduction_finished()
        return False

    def all_reduce_bucket(self, bucket: Bucket) -> None:
        for earlier in self.buckets:
            if earlier.future is not None:
                earlier.wait()
        bucket.reduce_scatter()

    def wait_for_bucket(self, bucket: Bucket, future: Future) -> None:
        bucket.wait()


class Zero2(MiniDDP):
    """`MiniDDP`, after whose backward each rank has its slices of the average, and no `.grad`.

    `gradient_as_bucket_view` has no meaning here and must be False.
    """

    reducer_class = Zero2Reducer


class Zero2Optimizer(ZeroRedundancyOptimizer):
    """The optimizer of a `Zero2`: each rank updates the slices of which it has the gradients.

    Args:
        model: the wrapper.
        optimizer_class: one that works element by element.
        params: parameters or groups of them; all of the model's when None.
        defaults: keywords of `optimizer_class`.

    Clip by `clip_grad_norm_(optimizer.shards, max_norm)`.
    """

    def __init__(
        self,
        model: Zero2,
        optimizer_class: type[Optimizer],
        params: Any = None,
        **defaults: Any,
    ):
        self.model = model
        params = list(model.parameters() if params is None else params)
        super().__init__(params, optimizer_class, model.process_group, **defaults)

    def make_slices(self) -> list[Slices]:
        return [bucket.slices for bucket in self.model.reducer.buckets]

    def take_gradients(self) -> None:
        """The pieces have their gradients already."""
