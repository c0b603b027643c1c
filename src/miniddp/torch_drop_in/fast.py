"""Fewer and larger copies than the core makes, and hooks that take no lock: the drop-in's speed.

The core copies a full bucket in when its turn to be launched has come. A bucket of 25 MiB is then
launched late, and most of its gradients have left the cache. To copy each gradient on arrival would
cost more: large matrix products empty the cache, and a few lines of Python then take 10 to 30 µs.
So a *part* of about 4 MiB is copied in as soon as all its gradients have arrived, small gradients
in one call.

`FastReducer` replaces the collect phase of `miniddp.reducer.Reducer`, and `PartedBucket` the copies
of `miniddp.bucket.Bucket`.
The values are the same, bit by bit.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from miniddp.bucket import Bucket
from miniddp.buckets import MIB, Plan, initial_plan, sizes_of
from miniddp.reducer import Reducer, ReducerState

PART_BYTES = 4 * MIB  # the parameter with which a part reaches this size is its last
LARGE = 1 << 14  # elements: gradients that are smaller, on average, are copied in one call


class Part:
    """Neighboring parameters of a bucket, whose gradients are copied in together."""

    def __init__(self, bucket: Bucket, slots: slice):
        self.indices, self.parameters = bucket.indices[slots], bucket.parameters[slots]
        self.views = bucket.views[slots]
        self.rows = list(zip(self.indices, self.parameters, self.views, strict=False))
        self.flat = bucket.buffer[bucket.offsets[slots.start] : bucket.offsets[slots.stop]]
        self.small = self.flat.numel() < LARGE * len(self.rows)
        self.pending = 0  # how many of its gradients have not arrived


class PartedBucket(Bucket):
    """A bucket that copies its gradients in part by part."""

    def allocate(self) -> None:
        super().allocate()
        self.divide()

    def divide(self) -> None:
        """Make the parts, packed like buckets."""
        neighbors = initial_plan(sizes_of(self.parameters), [PART_BYTES])
        self.parts = [Part(self, slice(slots[0], slots[-1] + 1)) for slots in neighbors]
        self.divisor = 0  # of the last copy

    def reset(self) -> None:
        super().reset()
        for part in self.parts:
            part.pending = len(part.indices)

    def copy_in(self, divisor: int) -> None:
        for part in self.parts:
            self.copy_part_in(part, divisor)

    def copy_part_in(self, part: Part, divisor: int) -> list[int]:
        """Copy the gradients of `part` into the buffer, divided by `divisor`.

        Returns the indices of those that are sparse or of another dtype; they are not copied.
        """
        misfits: list[int] = []
        if not self._copied_together(part, divisor):
            for index, parameter, view in part.rows:
                if (gradient := parameter.grad) is None:
                    view.zero_()
                elif gradient.is_sparse or gradient.dtype != parameter.dtype:
                    misfits.append(index)
                elif divisor == 1:
                    view.copy_(gradient)  # a no-op if it is the view
                elif gradient is view:
                    view.div_(divisor)
                else:
                    torch.mul(gradient, self.reciprocal(divisor), out=view)
        if self.as_views:
            for index, parameter, view in part.rows:
                if parameter.grad is not None and index not in misfits:
                    parameter.grad = view
        return misfits

    def _copied_together(self, part: Part, divisor: int) -> bool:
        """Copy all gradients of `part` in one call, if they allow it; whether they did."""
        if not (part.small or divisor == 1):
            return False
        gradients = [parameter.grad for parameter in part.parameters]
        in_place = sum(map(is_, gradients, part.views))
        if in_place == len(gradients):
            if divisor > 1:
                part.flat.div_(divisor)
            return True
        both = zip(part.parameters, gradients, strict=True)
        plain = [g for p, g in both if g is not None and not g.is_sparse and g.dtype == p.dtype]
        if in_place or len(plain) < len(gradients):
            return False
        torch._foreach_copy_(part.views, plain)  # private: there is no public equivalent
        if divisor > 1:
            part.flat.mul_(self.reciprocal(divisor))
        return True

    def reciprocal(self, divisor: int) -> Tensor:
        """1 / `divisor`, kept from call to call: a number would become a new tensor in each."""
        if divisor != self.divisor:
            dtype, self.divisor = torch.promote_types(self.buffer.dtype, torch.float32), divisor
            self.kept_reciprocal = torch.tensor(1.0 / divisor, dtype=dtype, device="cpu")
        return self.kept_reciprocal

    def zeros(self) -> Tensor:
        """What a rank without gradients contributes."""
        return torch.zeros_like(self.buffer)

    def copy_out(self, slots: Sequence[int]) -> list[int]:
        held = [parameter.grad for parameter in self.parameters]
        if all(map(is_, held, self.views)):
            return []
        missing = [slot for slot in slots if held[slot] is None]
        if missing or self.as_views or self.buffer.is_complex() or _any_negated(held):
            return super().copy_out(slots)  # _foreach_copy_ refuses lazily negated gradients
        views = [self.views[slot] for slot in slots]
        gradients = [held[slot] for slot in slots]
        if gradients:  # from the end, which the all-reduce may have left in the cache
            torch._foreach_copy_(gradients[::-1], views[::-1])
        return []


def _any_negated(gradients: Sequence[Tensor | None]) -> bool:
    return any(gradient is not None and gradient.is_neg() for gradient in gradients)


class FastReducer(Reducer):
    """The core's reducer with buckets in parts and, while it is safe, hooks without a lock."""

    # Whether hooks skip the lock and `expect_autograd_hook` while REDUCING: only if one thread runs
    # them all, as on the CPU (do not split a backward over threads), and if these hooks have
    # nothing else to do. On a GPU, undefined gradients arrive in another thread.
    lock_free = False

    def __init__(self, *args: Any, **keywords: Any):
        self.part_of: dict[int, Part] = {}
        super().__init__(*args, **keywords)
        self.on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters)

    def make_bucket(self, indices: list[int]) -> Bucket:
        parameters = [self.parameters[index] for index in indices]
        return PartedBucket(indices, parameters, self.gradient_as_bucket_view)

    def initialize_buckets(self, plan: Plan) -> None:
        self.part_of = {}  # parts hold the old buffers
        super().initialize_buckets(plan)
        for bucket in self.buckets:
            for part in bucket.parts:
                self.part_of |= dict.fromkeys(part.indices, part)

    def autograd_hook(self, index: int) -> None:
        if self.lock_free and self.state is ReducerState.REDUCING:
            self.order.append(index)
            self.mark_variable_ready(index)
        else:
            super().autograd_hook(index)

    def mark_variable_ready(self, index: int) -> None:
        """Count a gradient. With its last one, a part is copied in, and perhaps a bucket full."""
        if (bucket := self.expected.pop(index, None)) is None:
            raise self.marked_twice(index)
        if not self.on_cpu:
            bucket.note_stream()
        part = self.part_of[index]
        part.pending -= 1
        if part.pending == 0:
            self.copy_part_in(bucket, part)
            bucket.pending -= len(part.indices)
            if bucket.pending == 0:
                self.mark_bucket_ready()

    @torch.no_grad()  # backward(create_graph=True) runs hooks in grad mode
    def copy_part_in(self, bucket: Bucket, part: Part) -> None:
        """Copy a part's gradients into the bucket's buffer."""
        bucket.wait_for_streams()
        with record_function("miniddp.copy_in"):
            misfits = bucket.copy_part_in(part, self.current_divisor)
        if misfits:
            raise self.unexpected_gradients(bucket, misfits)

    def copy_in(self, bucket: Bucket) -> None:
        """Its parts are in the buffer already."""
