"""ZeRO-2: as ZeRO-1, and each rank also keeps only its 1/W of the gradients.

    model = Zero2(module)
    optimizer = Zero2Optimizer(model, torch.optim.AdamW, lr=1e-3)

The core's reducer launches bucket after bucket while backward runs. Here a bucket is reduce-
scattered: rank r receives the average of its rows of each parameter, and the whole gradients are
freed. The shards hold these averages, so the buckets are planned at once and never rebuilt.

Cost for Ψ bytes of parameters: (W−1)/W·Ψ sent during backward, and as many by `step`: together
those of DDP. Memory: gradients and state of Ψ/W, and two buckets. Source: Rajbhandari et al., SC
2020.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from miniddp.bucket import Bucket
from miniddp.ddp import MiniDDP
from miniddp.reducer import Reducer
from miniddp.sharded.param import ShardedParam
from miniddp.sharded.reduction import Reduction
from miniddp.sharded.sharding import local_shard
from miniddp.sharded.zero1 import ZeroRedundancyOptimizer


class ShardedBucket(Bucket):
    """A bucket of which this rank keeps its rows of each parameter. It has no buffer."""

    def __init__(
        self, indices: Sequence[int], parameters: Sequence[Tensor], group: dist.ProcessGroup
    ):
        self.group = group
        self.params = [ShardedParam(local_shard(p, group), p) for p in parameters]
        self.reduction: Reduction | None = None
        super().__init__(indices, parameters)

    def allocate(self) -> None:
        self.buffer, self.views = self.parameters[0].new_empty(0), []

    def copy_in(self, divisor: int) -> None:
        """Divide by W (DDP multiplies by 1/W, which rounds differently), and copy to a message."""
        self.reduction = Reduction(self.params, self.group, None, divisor, divide_first=True)
        self.reduction.copy_in()

    def copy_out(self, slots: Sequence[int]) -> list[int]:
        """Add the averages to the shards' gradients: those that some rank has."""
        self.reduction.finish()
        self.reduction = None
        return []


class Zero2Reducer(Reducer):
    """Reduce-scatters each bucket, and frees its message when the next one is launched."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **(kwargs | {"plan_at_once": True}))

    def make_bucket(self, indices: list[int]) -> ShardedBucket:
        if self.gradient_as_bucket_view:
            raise ValueError("Zero2 keeps no gradients: gradient_as_bucket_view must be False")
        return ShardedBucket(indices, [self.parameters[i] for i in indices], self.process_group)

    def rebuild_buckets(self) -> bool:
        self.ensure_prior_reduction_finished()
        return False

    def all_reduce_bucket(self, bucket: Bucket) -> None:
        for earlier in self.buckets:
            if earlier.launched:
                earlier.reduction.wait_for_reduce_scatter()
        bucket.launched = True
        bucket.reduction.launch()

    def wait_for_bucket(self, bucket: Bucket) -> None:
        bucket.reduction.wait()


class Zero2(MiniDDP):
    """`MiniDDP`, after whose backward each rank has its rows of the average, and no `.grad`.

    `gradient_as_bucket_view` has no meaning here and must be False.
    """

    reducer_class = Zero2Reducer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of the shards included."""
        super().zero_grad(set_to_none)
        for bucket in self.reducer.buckets:
            for param in bucket.params:
                param.sharded_param.grad = None


class Zero2Optimizer(ZeroRedundancyOptimizer):
    """The optimizer of a `Zero2`: each rank updates the rows of which it has the gradients.

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

    def make_shards(self, parameters: list[Tensor]) -> dict[Tensor, nn.Parameter]:
        shard_of = {
            parameter: param.sharded_param
            for bucket in self.model.reducer.buckets
            for parameter, param in zip(bucket.parameters, bucket.params, strict=True)
        }
        # What was frozen when `model` was made is in no bucket, and never gets a gradient.
        return super().make_shards(parameters) | {
            p: shard_of[p] for p in parameters if p in shard_of
        }

    def take_gradients(self) -> None:
        """The shards have their gradients already."""
