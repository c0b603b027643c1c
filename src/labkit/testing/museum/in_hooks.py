"""Averages that are computed during backward, by hooks on the gradients."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.parts import (
    Exhibit,
    OverlappingTrainer,
    Trainer,
    average_gradients,
    copy_back,
    one_vector,
    trainable,
    used_somewhere,
)


class ParameterAveragingHook(Trainer):
    """Averages parameters, because its hook's argument is named grad.

    Claims: averages each gradient as soon as it is ready, in a few lines.

    The bug: `register_post_accumulate_grad_hook` passes the *parameter* to its hook; the gradient
    is in `parameter.grad`. The parameters are averaged, in place, during backward, and no gradient
    ever is.

    Symptom: each rank follows its own gradient and is pulled back to the mean at the next backward.
    The model trains, and the loss curve is close to the right one. After each step the replicas
    differ.

    Seen in: tutorials and homework on data parallelism from scratch.

    It also launches in the order in which gradients become ready on this rank, the bug of
    launch_when_locally_ready.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        for parameter in trainable(module):
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, grad: Tensor) -> None:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


class LastMicroBatchOnly(OverlappingTrainer):
    """Averages the gradient of the last micro-batch, and leaves the earlier ones local.

    Claims: averages each gradient in a hook, and skips the hook during accumulation.

    The bug: a tensor's hook (`register_hook`) receives the gradient of *this* backward pass, before
    it is added to `.grad`. The gradients of earlier micro-batches in `.grad` are never averaged.

    Symptom: none without accumulation. With k micro-batches, (k − 1)/k of the gradient is local,
    and the replicas diverge.

    Seen in: no_sync added later to a reducer built on gradient hooks.

    It also launches in the order in which gradients become ready on this rank, the bug of
    launch_when_locally_ready.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        for parameter in trainable(module):
            parameter.register_hook(self.average)

    def average(self, grad: Tensor) -> Tensor:
        if self.accumulating:
            return grad
        grad = grad / dist.get_world_size()
        dist.all_reduce(grad)
        return grad


class LaunchWhenLocallyReady(OverlappingTrainer):
    """Launches a bucket as soon as it is full on this rank.

    Claims: overlaps communication with backward: no bucket waits for another.

    The bug: collectives are matched by order, not by content. On another rank, gradients may become
    ready in another order (its data took another branch). Then rank 0's bucket 1 is added to rank
    1's bucket 2.

    Symptom: none while all ranks take the same path. Otherwise a hang, or an abort if sizes differ.
    If sizes are equal, two layers silently exchange their gradients.

    Seen in: short overlapping reducers that launch from a count of ready gradients.
    """

    def __init__(self, module: nn.Module, bucket_size: int = 2) -> None:
        super().__init__(module)
        backwards = trainable(module)[::-1]
        self.buckets = [
            backwards[i : i + bucket_size] for i in range(0, len(backwards), bucket_size)
        ]
        self.reset()
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, n=number: self.ready(n))

    def __call__(self, inputs: Tensor) -> Tensor:
        self.reset()
        return self.module(inputs)

    def reset(self) -> None:
        self.awaited = [len(bucket) for bucket in self.buckets]
        self.launched: dict[int, tuple[Tensor, dist.Work]] = {}

    def ready(self, number: int) -> None:
        self.awaited[number] -= 1
        if self.awaited[number] == 0 and not self.accumulating:
            self.launch(number)

    def launch(self, number: int) -> None:
        bucket = self.buckets[number]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = one_vector(gradients) / dist.get_world_size()
        self.launched[number] = flat, dist.all_reduce(flat, async_op=True)

    def finish(self) -> None:
        for number in range(len(self.buckets)):
            if number not in self.launched:
                self.launch(number)
        used = set(used_somewhere(self.module))
        for number, (flat, work) in self.launched.items():
            work.wait()
            averages = [torch.empty_like(parameter) for parameter in self.buckets[number]]
            copy_back(flat, averages)
            for parameter, average in zip(self.buckets[number], averages, strict=True):
                if parameter in used:
                    parameter.grad = average


class StaleReadyCount(OverlappingTrainer):
    """Counts ready gradients, and does not reset the count after a backward that raised.

    Claims: sends one flat all-reduce, from the hook of the last gradient to become ready.

    The bug: the count is reset when a step is finished. A backward that raises halfway never gets
    there. The next one starts with part of the count done, and sends before its last gradients
    exist.

    Symptom: one wrong step after each batch that was skipped, for example for lack of memory: the
    gradients of the first layers stay local. From then on the replicas differ.

    Seen in: reducers with a ready count, in training loops that catch an exception and continue.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.reset()
        for parameter in trainable(module):
            parameter.register_post_accumulate_grad_hook(self.ready)

    def reset(self) -> None:
        self.awaited = len(trainable(self.module))
        self.averaged = False

    def ready(self, parameter: nn.Parameter) -> None:
        if not self.accumulating:
            self.awaited -= 1
            if self.awaited == 0:
                self.average()

    def average(self) -> None:
        average_gradients(self.module)
        self.averaged = True

    def finish(self) -> None:
        if not self.averaged:  # some parameter took no part on this rank
            self.average()
        self.reset()


class WaitingHook(OverlappingTrainer):
    """Launches each all-reduce during backward, and waits for it immediately.

    Claims: overlaps communication with backward: every gradient is sent from its hook.

    The bug: `all_reduce` without `async_op=True` returns when the sum is there, and backward stands
    still until then. It also waits for the slowest rank at each parameter instead of once per step.

    Symptom: every gradient is right, and a step is no shorter than without overlap. With many small
    parameters it is longer than with one all-reduce after backward.

    Seen in: hook-based overlap that was never measured.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.backwards = trainable(module)[::-1]
        self.reset()
        for parameter in self.backwards:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def __call__(self, inputs: Tensor) -> Tensor:
        self.reset()
        return self.module(inputs)

    def reset(self) -> None:
        self.arrived: set[Tensor] = set()
        self.averages: list[Tensor] = []

    def ready(self, parameter: nn.Parameter) -> None:
        self.arrived.add(parameter)
        while not self.accumulating and self.next_one() in self.arrived:
            self.launch(self.next_one())

    def next_one(self) -> nn.Parameter | None:
        sent = len(self.averages)
        return self.backwards[sent] if sent < len(self.backwards) else None

    @torch.no_grad()
    def launch(self, parameter: nn.Parameter) -> None:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        average = gradient / dist.get_world_size()
        dist.all_reduce(average)
        self.averages.append(average)

    def finish(self) -> None:
        while (parameter := self.next_one()) is not None:
            self.launch(parameter)
        used = set(used_somewhere(self.module))
        for parameter, average in zip(self.backwards, self.averages, strict=True):
            if parameter in used:
                parameter.grad = average


EXHIBITS = (
    Exhibit(ParameterAveragingHook, "direction", "gradients_are_identical"),
    Exhibit(LastMicroBatchOnly, "direction", "accumulation_equals_full_batch"),
    Exhibit(LaunchWhenLocallyReady, "deadlock", "collectives_match"),
    Exhibit(StaleReadyCount, "direction", "survives_an_exception"),
    Exhibit(WaitingHook, "no overlap", "communication_overlaps_backward"),
)
