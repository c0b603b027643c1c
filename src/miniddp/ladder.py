"""The ladder: five ways to average gradients, each one idea beyond the one before.

| rung | the idea | all-reduces a step | begins |
|---|---|---|---|
| `PerParameter` | average after backward, tensor by tensor | P + 1 | after backward |
| `Flat` | one message in place of many: the link's latency is paid once | 1 | after backward |
| `OverlappedPerParameter` | send each gradient while backward computes the next | P + 1 | in it |
| `Bucketed` | messages of a middle size | B | after backward |
| `BucketedOverlapped` | a few large messages, sent during backward: what DDP does | B | in it |

for P parameters in B buckets, all of one dtype and device. Where there is one all-reduce more, it
tells which gradients exist; elsewhere that travels along. On every rung a rank sends about
2(W−1)/W bytes for each byte of gradient (a ring all-reduce does). All have one interface:

    rung = Flat(module)                # every rank gets rank 0's parameters and buffers
    with rung.no_sync():               # to accumulate: for all micro-batches but the last
        loss(module(first)).backward()
    loss(module(last)).backward()
    rung.finish()                      # after the last backward, before optimizer.step()

The rules that all obey, and that the simplest code forgets: every rank launches the same
all-reduces in the same order, whichever order its gradients appear in; a gradient missing on some
ranks counts as zeros; one missing on every rank stays None.

These are for reading and measuring. What a real reducer has beyond them (no `finish`, unused
parameters found in the graph, buckets reused and rearranged, communication hooks) is in
`miniddp.reducer`.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020, section 3.2, climbs the same rungs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from miniddp.buckets import arrival_plan, bucket_caps, sizes_of
from miniddp.manual import average_gradients, own_gradient
from miniddp.replicas import broadcast_tensors, size_of_group, verify_same_model

_HOOKS_ON: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()


class Rung:
    """What the rungs share: equal replicas at the start, and when not to communicate.

    Args:
        module: the replica of this rank, on one device or several.
        group: the process group; the default one when None.

    Raises ValueError if no parameter requires a gradient, RuntimeError if the ranks' modules
    differ in more than their values. Costs one broadcast of the module, once.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.module = module
        self.group = group or dist.group.WORLD
        self.world_size = size_of_group(group)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.accumulating = False
        # An earlier rung on this module must not go on averaging beside this one.
        for handle in _HOOKS_ON.pop(module, ()):
            handle.remove()
        if not self.parameters:
            raise ValueError(
                f"{type(module).__name__} has no parameter that requires a gradient: there is "
                "nothing to average, so call the module itself"
            )
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        verify_same_model(state, self.group)
        broadcast_tensors(list(state.values()), self.group, src=0)

    def _hook_gradients(self, hook: Callable[[nn.Parameter], None]) -> None:
        _HOOKS_ON[self.module] = [
            parameter.register_post_accumulate_grad_hook(hook) for parameter in self.parameters
        ]

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The module's own forward; rungs have nothing to do in it."""
        return self.module(*inputs, **named_inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward only accumulates into this rank's gradients."""
        self.accumulating, before = True, self.accumulating
        try:
            yield
        finally:
            self.accumulating = before

    def finish(self) -> None:
        """On return every rank has the average of all ranks' gradients.

        To be called by every rank after the last backward of a step, even where that raised: then
        every rank has launched the same collectives, and the next step begins afresh.
        """
        raise NotImplementedError


class PerParameter(Rung):
    """Rung 1: after backward, one all-reduce for each parameter."""

    def finish(self) -> None:
        average_gradients(self.module, group=self.group)


class Flat(Rung):
    """Rung 2: after backward, one all-reduce of everything, at the price of a copy in and out."""

    def finish(self) -> None:
        average_gradients(self.module, flat=True, group=self.group)


class OverlappedPerParameter(Rung):
    """Rung 3: one all-reduce for each parameter, launched as soon as its gradient is there.

    And as soon as its turn has come: the order is fixed, the module's backwards, since that is
    about the order in which gradients appear. No copies.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, group)
        self.order = self.parameters[::-1]
        self.ready: set[nn.Parameter] = set()
        self.launched: list[tuple[Tensor, dist.Work]] = []
        self._hook_gradients(self._gradient_is_ready)

    def _gradient_is_ready(self, parameter: nn.Parameter) -> None:
        if self.accumulating:
            return
        if parameter in self.ready:
            raise _second_backward(self.module, parameter)
        self.ready.add(parameter)
        while (turn := len(self.launched)) < len(self.order) and self.order[turn] in self.ready:
            self._launch(self.order[turn])

    def _launch(self, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            gradient = own_gradient(parameter)
            gradient /= self.world_size
        work = dist.all_reduce(gradient, group=self.group, async_op=True)
        self.launched.append((gradient, work))

    def finish(self) -> None:
        for parameter in self.order[len(self.launched) :]:  # did not appear on this rank, or late
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
    """Rung 4: after backward, one all-reduce for each bucket of about `bucket_cap_mb` MiB.

    By default a first bucket of 1 MiB and then 25, as torch has it; filled from the last parameter
    backwards. Gradients become views of their bucket, so there is a copy in and none out.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__(module, group)
        backwards = range(len(self.parameters) - 1, -1, -1)
        plan = arrival_plan(sizes_of(self.parameters), backwards, bucket_caps(bucket_cap_mb))
        self.buckets = [[self.parameters[index] for index in bucket] for bucket in plan]
        self.launched: list[tuple[Tensor, dist.Work]] = []

    def _launch(self, bucket: list[nn.Parameter]) -> None:
        with torch.no_grad():
            gradients = [own_gradient(parameter).reshape(-1) for parameter in bucket]
            exists = gradients[0].new_tensor([parameter.grad is not None for parameter in bucket])
            flat = torch.cat([*gradients, exists])
            flat /= self.world_size  # before the sum, so that half precision does not overflow
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.launched.append((flat, work))

    def finish(self) -> None:
        for bucket in self.buckets[len(self.launched) :]:
            self._launch(bucket)
        for bucket, (flat, work) in zip(self.buckets, self.launched, strict=True):
            work.wait()
            sizes = [parameter.numel() for parameter in bucket]
            *averages, exists = flat.split([*sizes, len(bucket)])
            for parameter, average, anywhere in zip(bucket, averages, exists.tolist(), strict=True):
                parameter.grad = average.view_as(parameter) if anywhere else None
        self.launched.clear()


class BucketedOverlapped(Bucketed):
    """Rung 5: each bucket is launched during backward, once it is full and its turn has come.

    A bucket that is full before its turn waits. Launched at once, it would meet another bucket of a
    rank whose gradients appear in another order.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__(module, group, bucket_cap_mb)
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.awaited = [set(bucket) for bucket in self.buckets]
        self._hook_gradients(self._gradient_is_ready)

    def _gradient_is_ready(self, parameter: nn.Parameter) -> None:
        if self.accumulating:
            return
        awaited = self.awaited[self.bucket_of[parameter]]
        if parameter not in awaited:
            raise _second_backward(self.module, parameter)
        awaited.remove(parameter)
        while (turn := len(self.launched)) < len(self.buckets) and not self.awaited[turn]:
            self._launch(self.buckets[turn])

    def finish(self) -> None:
        super().finish()
        self.awaited = [set(bucket) for bucket in self.buckets]


RUNGS: tuple[type[Rung], ...] = (
    PerParameter,
    Flat,
    OverlappedPerParameter,
    Bucketed,
    BucketedOverlapped,
)


def _second_backward(module: nn.Module, parameter: nn.Parameter) -> RuntimeError:
    names = {p: name for name, p in module.named_parameters()}
    return RuntimeError(
        f"the gradient of {names[parameter]} arrived a second time before finish(). Call finish() "
        "after every backward, also after one that raised; to accumulate over several, put all but "
        "the last under no_sync()."
    )
