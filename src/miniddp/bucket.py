"""One bucket: gradients side by side in a flat buffer, to travel in one message.

Every parameter has a *view* of the buffer, in the memory layout that autograd gives its gradient. A
gradient is divided by the world size while it is copied in; after the all-reduce it is copied out,
or, where gradients are views of the buckets, is there already.

Cost: one pass over the gradients' bytes in, and one out. A large gradient is divided and copied in
one pass the moment it arrives, while it is in the cache. Small ones wait for some dozens of
neighbors and are then copied by one call for all: for them the calls cost more than the bytes.

The arithmetic is that of mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp: a
gradient is multiplied by 1/W, one that lies in the buffer is divided by W; the bits may differ.
"""

import weakref
from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

# In elements: a gradient of so many is copied alone, smaller ones wait until they are so many.
LARGE, RUN = 1 << 14, 1 << 16


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
        self.device = parameters[
            0
        ].device  # a sparse bucket has no buffer before its first gradient
        self.buffer = torch.empty(0)
        self.views: list[Tensor] = []
        if not sparse:
            first = parameters[0]
            total = sum(p.numel() for p in parameters)
            self.buffer = torch.empty(total, dtype=first.dtype, device=first.device)
            self.views = self.views_of(self.buffer)
        self.runs = [Run(self, slots) for slots in _runs_of([p.numel() for p in parameters])]
        self.streams: set[torch.cuda.Stream] = set()
        self.rewind()

    def rewind(self) -> None:
        """Forget the last backward: all gradients are missing again."""
        self.streams.clear()
        for run in self.runs:
            run.missing = set(run.indices)
        self.missing_runs = len(self.runs)
        self.future: Future | None = None

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """A view of `flat` for each parameter, laid out as autograd lays out its gradient."""
        views = []
        offsets = accumulate((p.numel() for p in self.parameters), initial=flat.storage_offset())
        for offset, parameter in zip(offsets, self.parameters, strict=False):
            strides = parameter.stride()
            if not parameter.is_contiguous():
                dense = torch.empty_like(parameter, device="meta").stride() == strides
                if not dense:  # the gradient is row-major
                    strides = torch.empty(parameter.shape, device="meta").stride()
            views.append(flat.as_strided(parameter.shape, strides, offset))
        return views

    def zeros(self) -> Tensor:
        """Zeros in the form of the buffer."""
        if self.sparse:
            return torch.zeros_like(self.parameters[0], layout=torch.sparse_coo)
        return torch.zeros_like(self.buffer)

    def note_stream(self) -> None:
        """A gradient has arrived, on the CUDA stream that is current in this thread."""
        self.streams.add(torch.cuda.current_stream(self.device))

    def wait_for_streams(self) -> None:
        """Let the current CUDA stream wait for those on which gradients were computed or copied.

        torch's reducer does not wait: it relies on autograd accumulating all gradients on one
        stream, as it does unless one parameter's accumulator was made on another stream.
        """
        if not self.streams:
            return
        current = torch.cuda.current_stream(self.device)
        for stream in self.streams - {current}:
            current.wait_stream(stream)
            for parameter in self.parameters:
                if parameter.grad is not None:
                    for part in _memory_of(parameter.grad):
                        part.record_stream(current)

    def wait_for_default_stream(self) -> None:
        """Let the current CUDA stream wait for the default one, after waiting for a future of gloo.

        A future of NCCL makes the current stream wait for what it stands for. One of gloo knows of
        no stream: its thread has made its own current stream wait, and that is the default one.
        Without effect for a caller on the default stream, and while a CUDA graph is captured (of
        NCCL; gloo cannot be captured).
        """
        current = torch.cuda.current_stream(self.device)
        default = torch.cuda.default_stream(self.device)
        if current != default and not torch.cuda.is_current_stream_capturing():
            current.wait_stream(default)

    @torch.no_grad()
    def take_sparse(self, world_size: int | None) -> bool:
        """Let the buffer be the sparse gradient, divided as in `Run.copy_in`; False if dense."""
        gradient = self.parameters[0].grad
        if gradient is None:
            gradient = self.zeros()
        if gradient.is_sparse and world_size is not None:
            gradient.div_(world_size)
        self.buffer = gradient
        return gradient.is_sparse

    def copy_out(
        self, result: Tensor, slots: Sequence[int] | None, alias: bool, fill: bool
    ) -> list[int]:
        """Copy the averages in `result` to the gradients at `slots`, or to all of them.

        A missing gradient is made, if `fill`. With `alias` gradients are views of the buffer
        already; returned are the slots of those that are not.
        """
        if self.buffer.is_complex() and not result.is_complex():
            result = torch.view_as_complex(result)  # collectives may work on pairs of reals
        views = self.views
        if self.sparse:
            self.buffer.copy_(result)
            views = [self.buffer]
        elif result.data_ptr() != self.buffer.data_ptr():
            views = self.views_of(result)
            if alias:
                torch._foreach_copy_(self.views, views)
                views = self.views
        gradients = [parameter.grad for parameter in self.parameters]
        if all(map(is_, gradients, views)):
            return []
        targets, sources, replaced = [], [], []
        for slot in range(len(views)) if slots is None else slots:
            gradient, view = gradients[slot], views[slot]
            if gradient is None:
                if fill:
                    keep = alias or self.sparse
                    gradient = view if keep else torch.empty_like(view).copy_(view)
                    self.parameters[slot].grad = gradient
            elif self.sparse:
                self.parameters[slot].grad = view
            elif self.buffer.is_complex() and not alias:
                gradient.copy_(view)  # it may be lazily conjugated, which _foreach_copy_ refuses
            elif not alias:
                targets.append(gradient)
                sources.append(view)
            elif gradient is not view:
                replaced.append(slot)
        if targets:
            torch._foreach_copy_(targets, sources)
        return replaced


class Run:
    """Neighbors in a bucket, whose gradients are copied in together once all of them are there."""

    def __init__(self, bucket: Bucket, slots: range):
        self.bucket = weakref.ref(bucket)  # no cycle: buffers are to go with their bucket, at once
        self.indices = bucket.indices[slots.start : slots.stop]
        self.parameters = bucket.parameters[slots.start : slots.stop]
        self.views = bucket.views[slots.start : slots.stop]
        self.missing: set[int] = set()
        if not bucket.sparse:
            begin = self.views[0].storage_offset() if self.views else 0
            self.flat = bucket.buffer[begin : begin + sum(p.numel() for p in self.parameters)]

    @torch.no_grad()
    def copy_in(self, world_size: int | None, alias: bool) -> None:
        """Copy the gradients into the buffer, divided by `world_size` unless it is None.

        With `alias` the parameters' gradients become views of the buffer.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        factor = None if world_size is None else 1.0 / world_size
        if all(map(is_, gradients, self.views)):
            if world_size is not None:
                self.flat.div_(world_size)
            return
        if any(map(is_, gradients, repeat(None))) or any(map(is_, gradients, self.views)):
            for view, gradient in zip(self.views, gradients, strict=True):
                if gradient is None:
                    view.zero_()
                elif world_size is None:
                    view.copy_(gradient)
                elif gradient is view:
                    view.div_(world_size)
                else:
                    torch.mul(gradient, factor, out=view)
        elif factor is not None and len(gradients) == 1:
            torch.mul(gradients[0], factor, out=self.views[0])  # in one pass
        else:
            torch._foreach_copy_(self.views, gradients)  # has no public name
            if factor is not None:
                self.flat.mul_(factor)
        if alias:
            for parameter, view, gradient in zip(
                self.parameters, self.views, gradients, strict=True
            ):
                if gradient is not None:
                    parameter.grad = view

    def sparse_gradients(self) -> list[int]:
        """The indices of the parameters whose gradients are sparse, and cannot be copied in."""
        return [
            index
            for index, parameter in zip(self.indices, self.parameters, strict=True)
            if parameter.grad is not None and parameter.grad.layout != torch.strided
        ]


def _runs_of(numels: Sequence[int]) -> list[range]:
    """Slots in order: a large one alone, small ones together until they reach a run's size."""
    runs, start, size = [], 0, 0
    for slot, numel in enumerate(numels):
        if numel >= LARGE and slot > start:
            runs.append(range(start, slot))
            start, size = slot, 0
        size += numel
        if numel >= LARGE or size >= RUN:
            runs.append(range(start, slot + 1))
            start, size = slot + 1, 0
    if start < len(numels):
        runs.append(range(start, len(numels)))
    return runs


def _memory_of(gradient: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that hold a gradient: `record_stream` takes no sparse one."""
    if gradient.is_sparse:
        return gradient._indices(), gradient._values()
    return (gradient,)


def first_tensor(result: Any) -> Tensor:
    """A future of a collective holds a list of tensors, that of a comm hook may hold one tensor."""
    return result[0] if isinstance(result, list | tuple) else result
