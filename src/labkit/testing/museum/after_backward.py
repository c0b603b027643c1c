"""Averages that are computed after backward, in `finish`."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from labkit.testing.museum.parts import (
    AveragingTrainer,
    Exhibit,
    Trainer,
    copy_back,
    one_vector,
    used_somewhere,
)


class SumInsteadOfAverage(Trainer):
    """Sums the gradients and does not divide.

    Claims: all-reduces the gradients; `all_reduce` sums by default.

    The bug: the sum of W means is W times the mean of the whole batch.

    Symptom: the learning rate is W times the configured one. Adam divides by the gradient's size
    and hides it, and gradient clipping hides it whenever it clips. SGD diverges if W times the
    configured rate is too large.

    Seen in: hand-written loops; a change from DataParallel, which sums over replicas and is right
    for one loss over the gathered output.
    """

    def finish(self) -> None:
        for parameter in used_somewhere(self.module):
            dist.all_reduce(parameter.grad)


class DividedTwice(Trainer):
    """Divides by the world size before the sum, and again after it.

    Claims: divides before the sum, so that half-precision gradients cannot overflow.

    The bug: the division after the sum was not removed. The same happens if a communication hook
    and the wrapper both divide, or if the loss is divided as well as the gradient.

    Symptom: the learning rate is 1/W of the configured one. A sweep finds that a rate W times as
    large works better. Adam hides the bug, except in its ε, L2 weight decay, and clipping.

    Seen in: communication hooks; stacked libraries that each average.
    """

    def finish(self) -> None:
        for parameter in used_somewhere(self.module):
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class NoneSkipped(Trainer):
    """Skips the parameters that have no gradient.

    Claims: one all-reduce per parameter that was used, and none for the others.

    The bug: which parameters were used depends on this rank's data. A rank that skips one is a
    collective behind the others, and its next gradient is added to another parameter's.

    Symptom: none while every rank uses every parameter. Otherwise an abort if sizes differ, or a
    hang at the end of the step. If ranks skip different parameters of equal shape, gradients are
    silently wrong.

    Seen in: `if p.grad is not None:` in hand-written training loops, including tutorials.
    """

    def finish(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)


class ZerosForNone(Trainer):
    """Gives every parameter a gradient: zeros if there is none.

    Claims: all ranks call the same collectives, whichever parameters they used.

    The bug: it also fills parameters that no rank used. To an optimizer, zeros are not None:
    momentum and Adam's moments still move the weight, and weight decay shrinks it. Plain SGD does
    neither.

    Symptom: gradients are bitwise right. With weight decay, momentum, or Adam, weights move that
    one process would leave alone: experts not chosen, heads of tasks not drawn, layers that were
    dropped.

    Seen in: the usual fix for the hang of skipped parameters; optimizers' set_to_none=False.
    """

    def finish(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


class LastBucketForgotten(Trainer):
    """Sends each full bucket, and never the last, partly filled one.

    Claims: packs gradients into buckets of a given size, with one all-reduce per bucket.

    The bug: the gradients left in the open bucket after the last parameter are not sent.

    Symptom: a few gradients stay local, and all others are averaged. With a bucket larger than the
    model, none is averaged; with a model that fills its buckets exactly, all are. So the bug
    depends on a size that people tune.

    Seen in: short bucketing code with a test model that exactly fills its buckets.
    """

    def __init__(self, module: nn.Module, bucket_elements: int = 100) -> None:
        super().__init__(module)
        self.bucket_elements = bucket_elements

    def finish(self) -> None:
        bucket: list[Tensor] = []
        for parameter in used_somewhere(self.module):
            bucket.append(parameter.grad)
            if sum(gradient.numel() for gradient in bucket) >= self.bucket_elements:
                self.average(bucket)
                bucket = []

    def average(self, bucket: list[Tensor]) -> None:
        flat = one_vector(bucket) / dist.get_world_size()
        dist.all_reduce(flat)
        copy_back(flat, bucket)


class BufferUsedInFlight(Trainer):
    """Packs buckets into two buffers in turns, while the one before may still be on its way.

    Claims: overlaps packing and sending, with memory for two buckets instead of all of them.

    The bug: the third bucket is packed into the first buffer as soon as that has been unpacked, and
    it is unpacked without waiting for its all-reduce.

    Symptom: none as long as a bucket is sent before the next but one is packed, as on one machine
    or with small buckets. On a slower connection, a rank now and then unpacks its own gradients, or
    sends numbers of two buckets. A rerun is right, and so is a run with prints.

    Seen in: double buffers of sharded training; a micro-batch that is accumulated into a buffer
    that the one before has sent; buffers that are freed, or reused by an allocator, on another
    stream than the one that sends.
    """

    def finish(self) -> None:
        gradients = [parameter.grad for parameter in used_somewhere(self.module)]
        buckets = [gradients[i : i + 2] for i in range(0, len(gradients), 2)]
        sizes = [sum(gradient.numel() for gradient in bucket) for bucket in buckets]
        buffers = [gradients[0].new_empty(max(sizes)) for _ in range(2)]
        works = []
        for number, (bucket, size) in enumerate(zip(buckets, sizes, strict=True)):
            flat = buffers[number % 2][:size]
            if number >= 2:
                copy_back(buffers[number % 2][: sizes[number - 2]], buckets[number - 2])
            flat.copy_(one_vector(bucket) / dist.get_world_size())
            works.append(dist.all_reduce(flat, async_op=True))
        for number in range(max(len(buckets) - 2, 0), len(buckets)):
            works[number].wait()
            copy_back(buffers[number % 2][: sizes[number]], buckets[number])


class WholeVectorRing(Trainer):
    """Sends whole vectors around a ring, and lets each rank add them in order of arrival.

    Claims: a ring all-reduce in ten lines.

    The bug: rank r adds in the order r, r − 1, r − 2, …, a different one on every rank, and
    floating-point sums depend on their order. The ranks' averages differ in the last bits, and so
    do their weights. It is also slow: each rank sends (W − 1) whole vectors, a chunked ring at most
    two.

    Symptom: none on two ranks, because a + b = b + a. From three ranks on, replicas differ by
    rounding errors that grow with the steps. At a branch on a value (a clip, a loss scale, early
    stopping) ranks may take different paths.

    Seen in: tutorials that build collectives from send and receive.
    """

    def finish(self) -> None:
        for parameter in used_somewhere(self.module):
            parameter.grad = add_around_a_ring(parameter.grad) / dist.get_world_size()


def add_around_a_ring(mine: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total, travelling = mine.clone(), mine
    for _ in range(world_size - 1):
        arriving = torch.empty_like(mine)
        sent = dist.isend(travelling, (rank + 1) % world_size)
        dist.recv(arriving, (rank - 1) % world_size)
        sent.wait()
        total += arriving
        travelling = arriving
    return total


class ClipBeforeSync(AveragingTrainer):
    """Clips each rank's gradient, then averages.

    Claims: clips the gradient to the requested norm.

    The bug: an average of clipped gradients is not a clipped average. Local gradients are larger,
    because averaging removes noise, and each rank clips by its own factor.

    Symptom: the norm of the result is below the threshold, as it should be, but too far below.
    Ranks with large gradients, such as those with rare samples, lose weight.

    Seen in: clipping in a gradient hook, or between backward and a hand-written all-reduce.
    """

    def finish_and_clip(self, max_norm: float) -> None:
        clip_grad_norm_(self.module.parameters(), max_norm)
        self.finish()


class NoInitialBroadcast(AveragingTrainer):
    """Averages every gradient correctly, but every rank starts from its own weights.

    Claims: data parallelism needs nothing but averaged gradients.

    The bug: equal steps keep equal replicas equal, but keep different ones different. Nothing made
    the weights equal at the start.

    Symptom: gradients are bitwise equal, and every rank's loss falls, each on its own model. A
    rank's gradients were partly computed at other ranks' weights. If every process sets the same
    seed there is no symptom, until one of them draws an extra random number before it builds the
    model.

    Seen in: hand-written training loops that rely on a seed; models with buffers that are not
    broadcast.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module


EXHIBITS = (
    Exhibit(SumInsteadOfAverage, "scale", "gradients_equal_full_batch"),
    Exhibit(DividedTwice, "scale", "gradients_equal_full_batch"),
    Exhibit(NoneSkipped, "deadlock", "missing_counts_as_zeros"),
    Exhibit(ZerosForNone, "phantom update", "none_stays_none"),
    Exhibit(LastBucketForgotten, "direction", "gradients_are_identical"),
    Exhibit(BufferUsedInFlight, "direction", "gradients_equal_full_batch"),
    Exhibit(WholeVectorRing, "drift", "gradients_are_identical", ranks_needed=3),
    Exhibit(ClipBeforeSync, "direction", "clipping_equals_full_batch"),
    Exhibit(NoInitialBroadcast, "drift", "initial_state_is_broadcast"),
)
