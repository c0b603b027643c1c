"""One bucket: gradients side by side in one flat buffer, so that one message carries them all.

Each parameter has a *view* of the buffer, in the memory layout that autograd gives its gradient.
**This file is where `MiniDDP` divides a gradient**: by the world size W, while `copy_in` copies it
into the buffer. After the all-reduce, `copy_out` copies the averages to the gradients.

Cost: one copy in and one copy out; none for a gradient that already is its view. A *part* of about
4 MiB is copied in once all its gradients have arrived. To copy each one on arrival would cost more:
large matrix products empty the cache, and a few lines of Python then take 10 to 30 µs.

Source: the arithmetic of mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp. A
gradient outside the buffer is multiplied by 1/W; one inside it is divided by W.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import is_

import torch
from torch import Tensor
from torch.futures import Future

from miniddp.buckets import MIB, initial_plan, sizes_of

PART_BYTES = 4 * MIB  # the parameter with which a part reaches this size is its last
LARGE = 1 << 14  # elements: gradients that are smaller, on average, are copied in one call


class Part:
    """Neighboring parameters of a bucket, whose gradients are copied in together."""

    def __init__(self, bucket: "Bucket", slots: slice):
        self.indices, self.parameters = bucket.indices[slots], bucket.parameters[slots]
        self.views = bucket.views[slots]
        self.rows = list(zip(self.indices, self.parameters, self.views, strict=False))
        self.flat = bucket.buffer[bucket.offsets[slots.start] : bucket.offsets[slots.stop]]
        self.small = self.flat.numel() < LARGE * len(self.rows)
        self.pending = 0  # how many of its gradients have not arrived


class Bucket:
    """Parameters of one dtype and device that share a buffer, and the state of one backward.

    `indices` are the parameters' indices in the reducer; their positions here are called slots.
    """

    holds = "dense"

    def __init__(self, indices: list[int], parameters: list[Tensor]):
        self.indices, self.parameters = indices, parameters
        self.offsets = [0, *accumulate(p.numel() for p in parameters)]
        self.allocate()
        neighbors = initial_plan(sizes_of(parameters), [PART_BYTES])  # packed like buckets
        self.parts = [Part(self, slice(slots[0], slots[-1] + 1)) for slots in neighbors]
        self.divisor = 0  # of the last copy_in
        self.reset()

    def allocate(self) -> None:
        """Make the buffer, and views laid out like gradients. Overridden by extras.sparse."""
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
        self.on_cuda = self.buffer.is_cuda  # asked once per backward, not once per gradient
        self.streams: set[torch.cuda.Stream] = set()
        for part in self.parts:
            part.pending = len(part.indices)
        self.pending = len(self.parts)
        self.future: Future | None = None

    def wait_for_streams(self) -> None:
        """Make the current CUDA stream wait for those that computed or copied gradients.

        Tested on simulated streams (tests/miniddp/test_streams.py); no GPU has run it yet.
        """
        if not self.streams:
            return
        current = torch.cuda.current_stream(self.buffer.device)
        for stream in self.streams - {current}:
            current.wait_stream(stream)
            for parameter in self.parameters:
                if parameter.grad is not None:
                    for dense in self.dense_tensors(parameter.grad):
                        dense.record_stream(current)

    def dense_tensors(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The dense tensors that hold a gradient. Overridden by extras.sparse."""
        return (gradient,)

    def copy_in(self, part: Part, divisor: int, alias: bool) -> list[int]:
        """Copy the gradients of `part` into the buffer, divided by `divisor`.

        A missing one counts as zeros. One that is sparse or of another dtype is not copied, and its
        index is returned. With `alias`, each copied one becomes its view. Overridden by extras.
        """
        if divisor != self.divisor:  # Kept: a number would become a new tensor in every call.
            dtype, self.divisor = torch.promote_types(self.buffer.dtype, torch.float32), divisor
            self.reciprocal = torch.tensor(1.0 / divisor, dtype=dtype, device="cpu")
        wrong: list[int] = []
        if together := part.small or divisor == 1:  # in one call, if possible
            gradients = [parameter.grad for parameter in part.parameters]
            both = zip(part.parameters, gradients, strict=True)
            plain = [g for p, g in both if g is not None and not g.is_sparse and g.dtype == p.dtype]
            in_place = sum(map(is_, gradients, part.views))
            if in_place == len(gradients):
                if divisor > 1:
                    part.flat.div_(divisor)
                return wrong
            together = len(plain) == len(gradients) and not in_place
        if together:
            torch._foreach_copy_(part.views, plain)  # private: there is no public equivalent
            if divisor > 1:
                part.flat.mul_(self.reciprocal)
        for index, parameter, view in () if together else part.rows:
            if (gradient := parameter.grad) is None:
                view.zero_()
            elif gradient.is_sparse or gradient.dtype != parameter.dtype:
                wrong.append(index)
            elif divisor == 1:
                view.copy_(gradient)  # a no-op if it is the view
            elif gradient is view:
                view.div_(divisor)
            else:
                torch.mul(gradient, self.reciprocal, out=view)
        for index, parameter, view in part.rows if alias else ():
            if parameter.grad is not None and index not in wrong:
                parameter.grad = view
        return wrong

    def copy_out(self, slots: Sequence[int] | None, alias: bool) -> list[int]:
        """Copy the averages to the gradients at `slots` (None: all). A missing one is created.

        With `alias`, gradients are views and need no copy: only a missing one is set, to its view.
        Returns the slots whose gradient is not its view. Overridden by extras.
        """
        held = [parameter.grad for parameter in self.parameters]
        if all(map(is_, held, self.views)):
            return []
        slots = range(len(held)) if slots is None else slots
        for s, new in [(slot, self.views[slot]) for slot in slots if held[slot] is None]:
            held[s] = self.parameters[s].grad = new if alias else torch.empty_like(new).copy_(new)
        views = [self.views[slot] for slot in slots]
        gradients = [gradient for slot in slots if (gradient := held[slot]) is not None]
        if alias:
            return [s for s, g, view in zip(slots, gradients, views, strict=True) if g is not view]
        if self.buffer.is_complex() or any(map(Tensor.is_neg, gradients)):
            for gradient, view in zip(gradients, views, strict=True):
                gradient.copy_(view)  # _foreach_copy_ refuses lazily conjugated or negated ones
        elif gradients:  # from the end, which the all-reduce may have left in the cache
            torch._foreach_copy_(gradients[::-1], views[::-1])
        return []
