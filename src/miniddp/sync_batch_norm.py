"""SyncBatchNorm: batch normalization over the batch of all ranks, on a CPU, too.

Plain BatchNorm normalizes with the mean and variance of the rank's own batch. Its outputs,
gradients, and running statistics therefore differ from those of the full batch. No way of combining
gradients repairs that, because the loss itself is different. Here the ranks exchange statistics:

- Forward, one all-gather: each rank's count, mean, and sum of squared deviations per channel.
  They are merged by the formula of Chan, Golub and LeVeque (1979). An all-reduce of Σx and Σx²
  would be smaller, but loses all digits if the mean is large compared with the deviation.
- Backward, one all-reduce: Σ dy and Σ dy·x̂ per channel, because every input changed the mean and
  the variance, and so the outputs on all ranks. The gradients of weight and bias stay local, as
  for any parameter: DDP averages them.

Cost, in bytes sent by each rank for C channels: 2C·b + 8 to each other rank in forward, and
2·(W−1)/W · 2C·b in backward (by a ring). b is 4 for float32, and 8 for float64.

Source: `torch.nn.SyncBatchNorm` (torch/nn/modules/_functions.py), which refuses CPU tensors.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# The one base of BatchNorm1d, 2d and 3d, torch's SyncBatchNorm among them. It has no public name.
from torch.nn.modules.batchnorm import _BatchNorm

from miniddp.comm import this_group


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over a process group, with the parameters and buffers of BatchNorm.

    Input and output: (N, C, *), with two or more dimensions. N may differ between ranks and be 0 on
    some; C may not. Statistics are computed in float32 or higher. Every rank of the group must run
    the training forward, and backward, equally often.

    The running variance is unbiased, by the global count. In eval mode, with one rank, and
    without a process group, nothing is exchanged: it is plain BatchNorm.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as in `nn.BatchNorm2d`;
            with `momentum=None` the running statistics are plain averages over all batches.
        process_group: the ranks that share statistics; the default group when None.

    If the batch is empty on every rank, the output is empty and the running statistics stay as
    they are: the batch is not counted. (Plain BatchNorm counts it.)

    Raises ValueError in forward for an input of another shape. Raises it on every rank if the batch
    of all ranks has one value per channel, because its unbiased variance is not defined.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        **factory: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Replace every BatchNorm within `module` by a SyncBatchNorm, and return `module`.

        Parameters and buffers are reused, not copied, so an optimizer that has them stays valid.
        Hooks are not carried over. Convert before wrapping in DDP. If `module` itself is a
        BatchNorm, it cannot be changed in place: use the returned module.

        Raises ValueError for a lazy BatchNorm that has had no input yet, and so has no C.
        """
        if not isinstance(module, _BatchNorm):
            for name, child in module._modules.items():  # named_children() skips a second name
                if child is not None:
                    setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
            return module

        if module.num_features == 0:
            raise ValueError(f"{type(module).__name__} has no channels yet: run one forward first")
        sync = cls(module.num_features, module.eps, module.momentum, process_group=process_group)
        sync.affine, sync.track_running_stats = module.affine, module.track_running_stats
        for name in ("weight", "bias"):
            sync.register_parameter(name, getattr(module, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            sync.register_buffer(name, getattr(module, name))
        return sync.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            found = tuple(x.shape)
            raise ValueError(f"input has shape {found}, expected (N, {self.num_features}, *)")
        tracked = self.training and self.track_running_stats
        grouped = dist.is_available() and dist.is_initialized()
        if not self.training or not grouped or this_group(self.process_group).size() == 1:
            untracked = self.training and not tracked
            statistics = (None, None) if untracked else (self.running_mean, self.running_var)
            use_batch = self.training or self.running_mean is None
            momentum = self._count_batch() if tracked else 0.0
            affine = (self.weight, self.bias)
            return F.batch_norm(x, *statistics, *affine, use_batch, momentum, self.eps)

        mean, variance, count = _global_statistics(x, self.process_group)
        if tracked and count > 0:
            momentum = self._count_batch()
            unbiased = variance * (count / (count - 1))
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var), momentum)
        inverse = torch.rsqrt(variance + self.eps)
        return _Normalize.apply(x, self.weight, self.bias, mean, inverse, count, self.process_group)

    def _count_batch(self) -> float:
        """Count one more batch; return its weight in the running statistics."""
        self.num_batches_tracked.add_(1)
        return 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum


@torch.no_grad()
def _global_statistics(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, int]:
    """Mean (C) and biased variance (C) of the batch of all ranks, and its values per channel."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    channels, own_count = x.shape[1], x[:, 0].numel()
    own_mean = x.sum(_all_but_channels(x)) / max(own_count, 1)
    own_squares = (x - _per_channel(own_mean, x)).square().sum(_all_but_channels(x))
    # The count is sent as the bits of an integer: float32 has none between 2^24 and 2^24 + 2.
    count_bits = torch.tensor([own_count], device=x.device).view(own_mean.dtype)
    own = torch.cat([own_mean, own_squares, count_bits])

    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, own, group=group)
    sizes = [channels, channels, len(count_bits)]
    means, squares, count_bits = torch.stack(of_ranks).split(sizes, dim=1)
    counts = count_bits.contiguous().view(torch.int64)
    count = int(counts.sum())
    if count == 0:
        return torch.zeros_like(own_mean), torch.ones_like(own_mean), count
    if count == 1:
        raise ValueError("only 1 value per channel on all ranks together: training needs 2 or more")
    counts = counts.to(means.dtype)
    mean = (counts * means).sum(0) / count
    # Deviations from the common mean: within each rank, and of the ranks' means from it.
    return mean, (squares + counts * (means - mean).square()).sum(0) / count, count


class _Normalize(torch.autograd.Function):
    """x̂·weight + bias, with x̂ = (x − mean)·inverse; backward includes the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        count: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.group = count, group
        y = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
        if weight is not None:
            y = y * _per_channel(weight, x)
        if bias is not None:
            y = y + _per_channel(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        dy = dy.to(mean.dtype)
        normalized = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
        dims = _all_but_channels(x)
        d_bias, d_weight = dy.sum(dims), (dy * normalized).sum(dims)

        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([d_bias, d_weight])
            dist.all_reduce(sums, group=ctx.group)
            means = sums / max(ctx.count, 1)
            mean_dy, mean_dy_normalized = (_per_channel(m, x) for m in means.chunk(2))
            scale = _per_channel(inverse if weight is None else inverse * weight, x)
            dx = ((dy - mean_dy - normalized * mean_dy_normalized) * scale).to(x.dtype)
        d_weight, d_bias = (
            gradient if needed else None
            for gradient, needed in zip((d_weight, d_bias), ctx.needs_input_grad[1:3], strict=True)
        )
        return dx, d_weight, d_bias, None, None, None, None


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """(C) as (1, C, 1, …), to broadcast against `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
