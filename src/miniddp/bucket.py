"""One bucket: gradients side by side in one flat buffer, so that one message carries them all.

Each parameter has a *view* of the buffer, in the memory layout that autograd gives its gradient.
**This file is where `MiniDDP` divides a gradient**: by the world size W, while `copy_in` copies it
into the buffer. After the all-reduce, `copy_out` copies the averages to the gradients.

Cost: one copy in and one copy out; with views of the buffer as gradients, neither. A large gradient
is divided and copied in one pass as soon as it arrives, while it is in the cache. Small ones wait
for their neighbors (a `Run`), because for them the calls cost more than the bytes.

Source: the arithmetic of mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp. A
gradient outside the buffer is multiplied by 1/W; one inside it is divided by W.
"""

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor
from torch.futures import Future

# Elements: a gradient of at least LARGE is copied alone; smaller neighbors are copied together, at
# most about RUN at once.
LARGE, RUN = 1 << 14, 1 << 16


class Run:
    """Neighbors in a bucket whose gradients are copied in together, once all have arrived."""

    def __init__(self, bucket: "Bucket", slots: range):
        part = slice(slots.start, slots.stop)
        self.indices, self.parameters = bucket.indices[part], bucket.parameters[part]
        self.views = bucket.views[part]
        self.missing: set[int] = set()  # the indices whose gradients have not arrived
        begin = self.views[0].storage_offset() if self.views else 0
        self.flat = bucket.buffer[begin : begin + sum(view.numel() for view in self.views)]


class Bucket:
    """Parameters that travel together, of one dtype and device: a buffer, and one backward's state.

    `indices` are the parameters' indices in the reducer; their positions here are called slots.
    """

    holds = "dense"

    def __init__(self, indices: list[int], parameters: list[Tensor]):
        self.indices, self.parameters = indices, parameters
        self.allocate()
        self.runs = [Run(self, slots) for slots in self._runs()]
        self.streams: set[torch.cuda.Stream] = set()
        self.reset()

    def allocate(self) -> None:
        """Make the buffer and its views. Overridden by extras.sparse."""
        total = sum(parameter.numel() for parameter in self.parameters)
        self.buffer = self.parameters[0].new_empty(total)
        self.views = self.views_of(self.buffer)

    def _runs(self) -> list[range]:
        """Slots in order: a large gradient alone, small ones together until they reach RUN."""
        runs, start, size = [], 0, 0
        for slot, parameter in enumerate(self.parameters):
            large = parameter.numel() >= LARGE
            if large and slot > start:
                runs.append(range(start, slot))
                start, size = slot, 0
            size += parameter.numel()
            if large or size >= RUN or slot + 1 == len(self.parameters):
                runs.append(range(start, slot + 1))
                start, size = slot + 1, 0
        return runs

    def reset(self) -> None:
        """Forget the last backward: all gradients are missing again."""
        self.streams.clear()
        for run in self.runs:
            run.missing = set(run.indices)
        self.missing_runs = len(self.runs)
        self.future: Future | None = None

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """One view of `flat` per parameter, laid out as autograd lays out its gradient."""
        views, offset = [], flat.storage_offset()
        for parameter in self.parameters:
            strides = parameter.stride()
            if not parameter.is_contiguous():
                dense = torch.empty_like(parameter, device="meta").stride() == strides
                if not dense:  # autograd then makes the gradient row-major
                    strides = torch.empty(parameter.shape, device="meta").stride()
            views.append(flat.as_strided(parameter.shape, strides, offset))
            offset += parameter.numel()
        return views

    def wait_for_streams(self) -> None:
        """Let the current CUDA stream wait for those on which gradients were computed or copied.

        Tested on simulated streams (tests/miniddp/test_streams.py). No code for streams has run on
        a GPU yet; `make gpu` runs it.
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

    def misplaced(self) -> list[int]:
        """The slots of the gradients that this bucket cannot hold. Overridden by extras.sparse."""
        gradients = [parameter.grad for parameter in self.parameters]
        return [s for s, g in enumerate(gradients) if g is not None and g.layout != torch.strided]

    @torch.no_grad()
    def copy_in(self, run: Run, divisor: int | None, alias: bool) -> None:
        """Copy the gradients of `run` into the buffer, divided by `divisor` unless it is None.

        A missing gradient counts as zeros. With `alias`, the gradients become views of the buffer.
        Raises RuntimeError if a gradient is sparse.
        """
        views, gradients = run.views, [parameter.grad for parameter in run.parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if all(map(is_, gradients, views)):
            if divisor is not None:
                run.flat.div_(divisor)
            return
        if len(present) < len(gradients) or any(map(is_, gradients, views)):
            for view, gradient in zip(views, gradients, strict=True):
                if gradient is None:
                    view.zero_()
                elif divisor is None:
                    view.copy_(gradient)
                elif gradient is view:
                    view.div_(divisor)
                else:
                    torch.mul(gradient, 1.0 / divisor, out=view)
        elif divisor is not None and len(present) == 1:
            torch.mul(present[0], 1.0 / divisor, out=views[0])
        else:
            torch._foreach_copy_(views, present)  # has no public name
            if divisor is not None:
                run.flat.mul_(1.0 / divisor)
        if alias:
            for parameter, view, gradient in zip(run.parameters, views, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = view

    def copy_out(self, slots: Sequence[int] | None, alias: bool) -> list[int]:
        """Copy the averages to the gradients at `slots` (None: to all); create those that are None.

        With `alias`, gradients are views of the buffer already, and nothing is copied to them.
        Returns the slots whose gradient is no longer a view.
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
