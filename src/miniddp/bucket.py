"""One bucket: gradients side by side in one flat buffer, so that one message carries them all.

Each parameter has a *view* of the buffer, in the memory layout that autograd gives its gradient.
**This file is where `MiniDDP` divides a gradient**: by the world size W, while `copy_in` copies it
into the buffer. After the all-reduce, `copy_out` copies the averages to the gradients.

Cost: one copy in and one copy out; none for a gradient that already is its view.

Source: the arithmetic of mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp. A
gradient outside the buffer is multiplied by 1/W; one inside it is divided by W.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.futures import Future


class Bucket:
    """Parameters of one dtype and device that share a buffer, and the state of one backward.

    Args:
        indices: the parameters' indices in the reducer; their positions here are called slots.
        parameters: the parameters, in the same order.
        as_views: whether gradients become views of the buffer (`gradient_as_bucket_view`).
    """

    def __init__(
        self, indices: Sequence[int], parameters: Sequence[Tensor], as_views: bool = False
    ):
        self.indices, self.parameters = list(indices), list(parameters)
        self.as_views = as_views
        self.allocate()
        self.reset()

    def allocate(self) -> None:
        """Make the buffer, and one view per parameter, laid out like its gradient."""
        self.offsets = [0, *accumulate(parameter.numel() for parameter in self.parameters)]
        self.buffer = self.parameters[0].new_empty(self.offsets[-1])
        self.views = []
        for parameter, offset in zip(self.parameters, self.offsets, strict=False):
            strides, contiguous = parameter.stride(), parameter.is_contiguous()
            if not contiguous and torch.empty_like(parameter, device="meta").stride() != strides:
                # Not dense: autograd makes the gradient row-major.
                strides = torch.empty(parameter.shape, device="meta").stride()
            self.views.append(self.buffer.as_strided(parameter.shape, strides, offset))

    def reset(self) -> None:
        """Forget the last backward: no gradient has arrived."""
        self.pending = len(self.indices)  # how many gradients have not arrived
        self.launched = False
        self.future: Future | None = None  # of the all-reduce, while it runs
        self.streams: set[torch.cuda.Stream] = set()  # those that computed gradients

    def note_stream(self) -> None:
        """Remember the CUDA stream that computed a gradient: the current one in its hook."""
        if self.buffer.is_cuda:
            self.streams.add(torch.cuda.current_stream(self.buffer.device))

    def wait_for_streams(self) -> None:
        """Make the current CUDA stream wait for those that computed or copied gradients."""
        if not self.streams:
            return
        current = torch.cuda.current_stream(self.buffer.device)
        for stream in self.streams - {current}:
            current.wait_stream(stream)
            for parameter in self.parameters:
                if parameter.grad is not None:
                    self.record_stream(parameter.grad, current)

    def record_stream(self, gradient: Tensor, stream: torch.cuda.Stream) -> None:
        """Keep the gradient's memory from being reused before `stream` has read it."""
        gradient.record_stream(stream)

    def misfits(self) -> list[int]:
        """The indices of the parameters with a sparse gradient, or one of another dtype."""
        found = []
        for index, parameter in zip(self.indices, self.parameters, strict=True):
            gradient = parameter.grad
            if gradient is not None and (gradient.is_sparse or gradient.dtype != parameter.dtype):
                found.append(index)
        return found

    def copy_in(self, divisor: int) -> None:
        """Copy each gradient to its place in the buffer, divided by `divisor`; zeros for None."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is view:
                view.div_(divisor)
            else:
                torch.mul(gradient, 1 / divisor, out=view)
                if self.as_views:
                    parameter.grad = view

    def copy_out(self, slots: Sequence[int]) -> list[int]:
        """Copy the averages to the gradients at `slots`. A missing gradient is created.

        With `as_views`, nothing is copied: only a missing gradient is set, to its view. Returns the
        indices of the parameters with a gradient that should be its view and is not.
        """
        replaced = []
        for slot in slots:
            parameter, view = self.parameters[slot], self.views[slot]
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = view if self.as_views else torch.empty_like(view).copy_(view)
            elif not self.as_views:
                gradient.copy_(view)
            elif gradient is not view:
                replaced.append(self.indices[slot])
        return replaced
