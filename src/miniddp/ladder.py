"""The ladder: five ways to average gradients, from one all-reduce per parameter to DDP's way.

| rung | the idea | all-reduces per step | they begin |
|---|---|---|---|
| `PerParameter` | average after backward, tensor by tensor | P + 1 | after backward |
| `Flat` | one message instead of many: the link's latency is paid once | 1 | after backward |
| `OverlappedPerParameter` | send a gradient while backward computes the next | P + 1 | during it |
| `Bucketed` | messages of a middle size | B | after backward |
| `BucketedOverlapped` | a few large messages, sent during backward: what DDP does | B | during it |

for P parameters in B buckets, all of one dtype and device. The + 1 tells which gradients exist;
the other rungs send these flags with the gradients. All rungs have one interface:

    rung = Flat(module)                # every rank gets rank 0's parameters and buffers
    with rung.no_sync():               # to accumulate: for all micro-batches but the last
        loss(module(first)).backward()
    loss(module(last)).backward()
    rung.finish()                      # after the last backward, before optimizer.step()

All obey the two rules of `miniddp.manual`. On a GPU, run the forward on one CUDA stream: only
`miniddp.reducer` waits for other streams. Source: section 3.2 of Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp import errors
from miniddp.autograd_graph import hook_accumulators
from miniddp.buckets import arrival_plan, bucket_caps, sizes_of
from miniddp.comm import this_group
from miniddp.manual import Group, average_gradients, local_gradient
from miniddp.replicas import broadcast_tensors, verify_same_model


class Rung:
    """What the rungs share: equal replicas at the start, and when not to communicate.

    Raises ValueError if no parameter of `module` requires a gradient, RuntimeError if the modules
    of the ranks in `group` (None: the default one) differ in more than their values.
    """

    overlaps = False

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        self.module, self.group = module, this_group(group)
        self.world_size = self.group.size()
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.accumulating = False
        self.launched: list[tuple[Tensor, dist.Work]] = []
        nothing = ValueError(errors.nothing_to_average(type(module).__name__))
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        verify_same_model(state, self.group, problem=None if self.parameters else nothing)
        broadcast_tensors(list(state.values()), self.group, src=0)
        # Even without overlap: this also stops an earlier rung on the same module.
        self.accumulators, self.remove_hooks = hook_accumulators(self, self.parameters)
        if not self.overlaps:
            self.remove_hooks()

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The module's own forward."""
        return self.module(*inputs, **named_inputs)

    def reset_state(self) -> None:
        """Another rung on the same module takes over."""
        self.remove_hooks()

    def autograd_hook(self, index: int) -> None:
        """Called during backward when a gradient is ready."""
        if not self.accumulating:
            self.mark_ready(self.parameters[index])

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """On the rungs that overlap: launch what is ready."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A backward in here only accumulates on this rank. (In MiniDDP, the forward decides.)"""
        self.accumulating, before = True, self.accumulating
        try:
            yield
        finally:
            self.accumulating = before

    def finish(self) -> None:
        """Average. Every rank calls it after a step's last backward, even if that raised."""
        raise NotImplementedError

    def second_backward(self, parameter: nn.Parameter) -> RuntimeError:
        """A gradient arrived a second time within one step."""
        names = {p: name for name, p in self.module.named_parameters()}
        return RuntimeError(
            f"the gradient of {names[parameter]} arrived a second time before finish(). Call it "
            "after every backward, even one that raised; to accumulate, use no_sync()."
        )


class PerParameter(Rung):
    """Rung 1: after backward, one all-reduce per parameter."""

    def finish(self) -> None:
        average_gradients(self.module, group=self.group)


class Flat(Rung):
    """Rung 2: after backward, one all-reduce of everything, at the price of a copy in and out."""

    def finish(self) -> None:
        average_gradients(self.module, flat=True, group=self.group)


class OverlappedPerParameter(Rung):
    """Rung 3: one all-reduce per ready gradient, from the last parameter to the first; no copy."""

    overlaps = True

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__(module, group)
        self.order = self.parameters[::-1]
        self.ready: set[nn.Parameter] = set()

    def mark_ready(self, parameter: nn.Parameter) -> None:
        if parameter in self.ready:
            raise self.second_backward(parameter)
        self.ready.add(parameter)
        while (turn := len(self.launched)) < len(self.order) and self.order[turn] in self.ready:
            self._launch(self.order[turn])

    def _launch(self, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            gradient = local_gradient(parameter)
            gradient /= self.world_size
        self.launched.append((gradient, dist.all_reduce(gradient, group=self.group, async_op=True)))

    def finish(self) -> None:
        for parameter in self.order[len(self.launched) :]:  # late, or missing on this rank
            self._launch(parameter)
        has_gradient = [float(parameter.grad is not None) for parameter in self.order]
        exists = torch.tensor(has_gradient, device=self.order[0].device)
        dist.all_reduce(exists, group=self.group)
        in_order = zip(self.order, self.launched, exists.tolist(), strict=True)
        for parameter, (gradient, work), anywhere in in_order:
            work.wait()
            parameter.grad = gradient if anywhere else None
        self.ready.clear()
        self.launched.clear()


class Bucketed(Rung):
    """Rung 4: after backward, one all-reduce per bucket of about `bucket_cap_mb` MiB.

    Buckets are filled from the last parameter on. Gradients become views: one copy in, none out.
    """

    def __init__(
        self, module: nn.Module, group: Group = None, bucket_cap_mb: float | None = None
    ) -> None:
        super().__init__(module, group)
        backwards = range(len(self.parameters) - 1, -1, -1)
        plan = arrival_plan(sizes_of(self.parameters), backwards, bucket_caps(bucket_cap_mb))
        self.buckets = [[self.parameters[index] for index in bucket] for bucket in plan]
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.awaited = [set(bucket) for bucket in self.buckets]

    def _launch(self, bucket: list[nn.Parameter]) -> None:
        with torch.no_grad():
            gradients = [local_gradient(parameter).reshape(-1) for parameter in bucket]
            exists = gradients[0].new_tensor([parameter.grad is not None for parameter in bucket])
            flat = torch.cat([*gradients, exists])
            flat /= self.world_size  # before the sum, which could overflow in half precision
        self.launched.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))

    def finish(self) -> None:
        for bucket in self.buckets[len(self.launched) :]:
            self._launch(bucket)
        for bucket, (flat, work) in zip(self.buckets, self.launched, strict=True):
            work.wait()
            *averages, exists = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for parameter, average, anywhere in zip(bucket, averages, exists.tolist(), strict=True):
                parameter.grad = average.view_as(parameter) if anywhere else None
        self.launched.clear()
        self.awaited = [set(bucket) for bucket in self.buckets]


class BucketedOverlapped(Bucketed):
    """Rung 5: each bucket is launched during backward, once it is full and its turn has come.

    A bucket that is full before its turn waits. Without turns, ranks whose gradients arrive in
    different orders would add up different buckets.
    """

    overlaps = True

    def mark_ready(self, parameter: nn.Parameter) -> None:
        awaited = self.awaited[self.bucket_of[parameter]]
        if parameter not in awaited:
            raise self.second_backward(parameter)
        awaited.remove(parameter)
        while (turn := len(self.launched)) < len(self.buckets) and not self.awaited[turn]:
            self._launch(self.buckets[turn])


RUNGS = (PerParameter, Flat, OverlappedPerParameter, Bucketed, BucketedOverlapped)
