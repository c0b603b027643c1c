"""One bucket: gradients side by side in a flat buffer, to travel in one message.

Every parameter has a *view* of the buffer, in the memory layout that autograd gives its gradient. A
gradient is divided by the world size while it is copied in; after the all-reduce it is copied out,
or, where gradients are views of the buckets, is there already.

Cost: one pass over the gradients' bytes in, and one out. Small gradients wait until their bucket is
full and are then copied by two calls for all of them: for them the calls cost more than the bytes.
A large one is divided and copied in one pass the moment it arrives, while it is in the cache.

The arithmetic is that of mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp: a
gradient is multiplied by 1/W, one that lies in the buffer is divided by W; the bits may differ.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.futures import Future

# Gradients of fewer elements wait for their bucket.
LARGE = 1 << 14


class GradBucket:
    """A full bucket as a comm hook sees it: the methods of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: "Bucket", index: int, count: int, buffer: Tensor | None = None):
        self._bucket, self._index, self._count = bucket, index, count
        self._buffer = bucket.buffer if buffer is None else buffer

    def index(self) -> int:
        """The bucket's place in the launch order, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket is launched after this one in this backward."""
        return self._index == self._count - 1

    def buffer(self) -> Tensor:
        """All gradients of the bucket, one-dimensional, not divided; a sparse one as it is."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer()` and `gradients()` speak of another tensor of as many elements."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views into `buffer()`, one a parameter, in its shape."""
        if self._bucket.sparse:
            return [self._buffer]
        parameters = self._bucket.parameters
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their gradients."""
        return self._bucket.parameters


class Bucket:
    """Parameters that travel together: their buffer, its views, and the state of one backward."""

    def __init__(self, indices: list[int], parameters: list[Tensor], sparse: bool):
        self.indices = indices
        self.parameters = parameters
        self.sparse = sparse
        self.buffer = torch.empty(0)
        self.views: list[Tensor] = []
        self.late: list[int] = []
        if not sparse:
            first = parameters[0]
            total = sum(p.numel() for p in parameters)
            self.buffer = torch.empty(total, dtype=first.dtype, device=first.device)
            self.views = self.views_of(self.buffer)
            self.late = [slot for slot, p in enumerate(parameters) if p.numel() < LARGE]
        self.streams: set[torch.cuda.Stream] = set()
        self.rewind()

    def rewind(self) -> None:
        """Forget the last backward: all gradients are missing again."""
        self.streams.clear()
        self.missing = len(self.parameters)
        self.future: Future | None = None

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """A view of `flat` for each parameter, laid out as autograd lays out its gradient."""
        views = []
        offsets = accumulate((p.numel() for p in self.parameters), initial=flat.storage_offset())
        for offset, parameter in zip(offsets, self.parameters, strict=False):
            strides = torch.empty_like(parameter, device="meta").stride()
            if strides != parameter.stride():  # not dense: the gradient is row-major
                strides = torch.empty(parameter.shape, device="meta").stride()
            views.append(flat.as_strided(parameter.shape, strides, offset))
        return views

    def zeros(self) -> Tensor:
        """Zeros in the form of the buffer."""
        if self.sparse:
            return torch.zeros_like(self.parameters[0], layout=torch.sparse_coo)
        return torch.zeros_like(self.buffer)

    def wait_for_streams(self) -> None:
        """Let the current CUDA stream wait for those on which these gradients were computed."""
        current = torch.cuda.current_stream(self.buffer.device)
        for stream in self.streams - {current}:
            current.wait_stream(stream)
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.record_stream(current)

    def copy_in(self, slots: Sequence[int], world_size: int | None, alias: bool) -> None:
        """Copy the gradients at `slots` into the buffer, divided by `world_size` unless it is None.

        With `alias` the parameters' gradients become views of the buffer.
        """
        copied, sources, in_place = [], [], []
        for slot in slots:
            view, gradient = self.views[slot], self.parameters[slot].grad
            if gradient is None:
                view.zero_()
            elif alias and same_memory(gradient, view):
                in_place.append(view)
            else:
                copied.append(view)
                sources.append(gradient)
                if alias:
                    self.parameters[slot].grad = view
        # The `_foreach` calls have no public name; they do what a loop over mul and copy_ would.
        if len(copied) == 1 and world_size is not None and not sources[0].requires_grad:
            torch.mul(sources[0], 1.0 / world_size, out=copied[0])
        elif copied:
            torch._foreach_copy_(copied, sources)
            if world_size is not None and len(copied) == len(self.parameters):
                self.buffer.mul_(1.0 / world_size)
            elif world_size is not None:
                torch._foreach_mul_(copied, 1.0 / world_size)
        if in_place and world_size is not None:
            torch._foreach_div_(in_place, float(world_size))


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share their storage; an empty one shares with itself only."""
    return a is b or a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
