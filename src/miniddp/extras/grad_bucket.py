"""A full bucket as a comm hook sees it: the methods of `torch.distributed.GradBucket`."""

from torch import Tensor

from miniddp.bucket import Bucket


class GradBucket:
    """The local gradients of one bucket, *not* divided by W, for a comm hook to communicate.

    Args:
        bucket: the bucket.
        index: its place in the launch order, from 0.
        count: how many buckets this backward launches.
        buffer: used instead of the bucket's own.
    """

    def __init__(self, bucket: Bucket, index: int, count: int, buffer: Tensor | None = None):
        self._bucket, self._index, self._count = bucket, index, count
        self._buffer = bucket.buffer if buffer is None else buffer

    def index(self) -> int:
        """The place in the launch order, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket is launched after this one in this backward."""
        return self._index == self._count - 1

    def buffer(self) -> Tensor:
        """All gradients in one dimension, not divided; a sparse gradient as it is."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Use another tensor of the same number of elements as the buffer."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """One view of `buffer()` per parameter, in the parameter's shape."""
        if self._buffer.is_sparse:
            return [self._buffer]
        parameters = self._bucket.parameters
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their gradients."""
        return self._bucket.parameters
