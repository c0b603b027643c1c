"""Launches each all-reduce during backward, and waits for it immediately.

Claims: overlaps communication with backward: every gradient is sent from its hook.

The bug: `all_reduce` without `async_op=True` returns when the sum is there, and backward stands
still until then. It also waits for the slowest rank at each parameter instead of once per step.

Symptom: every gradient is right, and a step is no shorter than without overlap. With many small
parameters it is longer than with one all-reduce after backward.

Seen in: hook-based overlap that was never measured.

Kind: no overlap. Caught by communication_overlaps_backward.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import OverlappingTrainer, used_somewhere


class WaitingHook(OverlappingTrainer):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.backwards = [p for p in reversed(list(module.parameters())) if p.requires_grad]
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


EXHIBIT = Exhibit(WaitingHook, bug="no overlap", caught_by="communication_overlaps_backward")
