"""One bucket: gradients side by side in one flat buffer, so that one message carries them all.

Each parameter has a *view* of the buffer, in the memory layout that autograd gives its gradient.
**This file is where `MiniDDP` divides a gradient**: by the world size W, while `copy_in` copies it
into the buffer. After the all-reduce, `copy_out` copies the averages to the gradients.

Cost: one copy in and one copy out; neither for a gradient that already is its view. A large one is
copied as soon as it arrives, while it is in the cache. Small neighbors (a `Run`) share one call
once all have arrived: for them, the calls cost more than the bytes.

Source: the arithmetic of mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp. A
gradient outside the buffer is multiplied by 1/W; one inside it is divided by W.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import is_

import torch
from torch import Tensor
from torch.futures import Future

LARGE = 1 << 14  # elements: a gradient with at least this many is copied alone


class Run:
    """Neighbors in a bucket whose gradients are copied in together, once all have arrived."""

    def __init__(self, bucket: "Bucket", slots: list[int]):
        part = slice(slots[0], slots[-1] + 1)
        self.indices, self.parameters = bucket.indices[part], bucket.parameters[part]
        self.views = bucket.views[part]
        begin = self.views[0].storage_offset() if self.views else 0
        self.flat = bucket.buffer[begin : begin + sum(view.numel() for view in self.views)]
        self.pending = 0  # how many of its gradients have not arrived


class Bucket:
    """Parameters of one dtype and device that share a buffer, and the state of one backward.

    `indices` are the parameters' indices in the reducer; their positions here are called slots.
    """

    holds = "dense"

    def __init__(self, indices: list[int], parameters: list[Tensor]):
        self.indices, self.parameters = indices, parameters
        self.allocate()

        def run_of(slot: int) -> int:
            return slot if parameters[slot].numel() >= LARGE else -1

        self.runs = [Run(self, list(slots)) for _, slots in groupby(range(len(indices)), run_of)]
        self.streams: set[torch.cuda.Stream] = set()
        self.reset()

    def allocate(self) -> None:
        """Make the buffer, and views laid out like gradients. Overridden by extras.sparse."""
        self.buffer = self.parameters[0].new_empty(sum(p.numel() for p in self.parameters))
        self.views, offset = [], 0
        for parameter in self.parameters:
            strides, contiguous = parameter.stride(), parameter.is_contiguous()
            if not contiguous and torch.empty_like(parameter, device="meta").stride() != strides:
                # Not dense: autograd makes the gradient row-major.
                strides = torch.empty(parameter.shape, device="meta").stride()
            self.views.append(self.buffer.as_strided(parameter.shape, strides, offset))
            offset += parameter.numel()

    def reset(self) -> None:
        """Forget the last backward: no gradient has arrived."""
        self.on_cuda = self.buffer.is_cuda  # asked once per backward, not once per gradient
        self.streams.clear()
        for run in self.runs:
            run.pending = len(run.indices)
        self.pending = len(self.runs)
        self.future: Future | None = None

    def wait_for_streams(self) -> None:
        """Let the current CUDA stream wait for those on which gradients were computed or copied.

        Tested on simulated streams (tests/miniddp/test_streams.py); no GPU has run it yet.
        """
        if not self.streams:
            return
        current = torch.cuda.current_stream(self.buffer.device)
        for stream in self.streams - {current}:
            current.wait_stream(stream)
            for parameter in self.parameters:
                if parameter.grad is not None:
                    for part in self.dense_parts(parameter.grad):
                        part.record_stream(current)

    def dense_parts(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The dense tensors that hold a gradient. Overridden by extras.sparse."""
        return (gradient,)

    @torch.no_grad()
    def copy_in(self, run: Run, divisor: int | None, alias: bool) -> list[int]:
        """Copy the gradients of `run` into the buffer, divided by `divisor` unless it is None.

        A missing one counts as zeros. With `alias`, the others become views. Returns the
        indices of sparse ones; if there is one, nothing is copied. Overridden by extras.
        """
        views, gradients = run.views, [parameter.grad for parameter in run.parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if sparse := [i for i, g in enumerate(gradients) if g is not None and g.is_sparse]:
            return [run.indices[i] for i in sparse]
        in_place = sum(map(is_, gradients, views))
        if in_place == len(views):
            if divisor is not None:
                run.flat.div_(divisor)
            return []
        if in_place or len(present) < len(views) or len(views) == 1:
            for view, gradient in zip(views, gradients, strict=True):
                if gradient is None:
                    view.zero_()
                elif divisor is None:
                    view.copy_(gradient)
                elif gradient is view:
                    view.div_(divisor)
                else:
                    torch.mul(gradient, 1.0 / divisor, out=view)
        else:
            torch._foreach_copy_(views, present)  # has no public name
            if divisor is not None:
                run.flat.mul_(1.0 / divisor)
        if alias:
            for parameter, view, gradient in zip(run.parameters, views, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = view
        return []

    def copy_out(self, slots: Sequence[int] | None, alias: bool) -> list[int]:
        """Copy the averages to the gradients at `slots` (None: all); create those that are None.

        With `alias`, gradients are views of the buffer and need no copy; None becomes a view.
        Returns the slots whose gradient is no longer a view. Overridden by extras.
        """
        gradients, views = [parameter.grad for parameter in self.parameters], self.views
        if all(map(is_, gradients, views)):
            return []
        targets, sources, replaced = [], [], []
        for slot in range(len(views)) if slots is None else slots:
            gradient, view = gradients[slot], views[slot]
            if gradient is None:
                self.parameters[slot].grad = view if alias else torch.empty_like(view).copy_(view)
            elif alias and gradient is not view:
                replaced.append(slot)
            elif not alias and view.is_complex():
                gradient.copy_(view)  # may be lazily conjugated, which _foreach_copy_ refuses
            elif not alias:
                targets.append(gradient)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
        return replaced
