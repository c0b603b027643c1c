"""Launches a bucket as soon as it is full on this rank.

Claims: overlaps communication with backward: no bucket waits for another.

The bug: collectives are matched by order, not by content. On another rank, gradients may become
ready in another order (its data took another branch). Then rank 0's bucket 1 is added to rank 1's
bucket 2.

Symptom: none while all ranks take the same path. Otherwise a hang, or an abort if sizes differ. If
sizes are equal, two layers silently exchange their gradients.

Seen in: short overlapping reducers that launch from a count of ready gradients.

Kind: a deadlock. Caught by collectives_match.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import OverlappingTrainer, copy_back, one_vector, used_somewhere


class LaunchWhenLocallyReady(OverlappingTrainer):
    def __init__(self, module: nn.Module, bucket_size: int = 2) -> None:
        super().__init__(module)
        backwards = [p for p in reversed(list(module.parameters())) if p.requires_grad]
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


EXHIBIT = Exhibit(LaunchWhenLocallyReady, bug="deadlock", caught_by="collectives_match")
