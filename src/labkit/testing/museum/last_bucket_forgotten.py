"""Sends each full bucket, and never the last, partly filled one.

Claims: packs gradients into buckets of a given size, with one all-reduce per bucket.

The bug: the gradients left in the open bucket after the last parameter are not sent.

Symptom: a few gradients stay local, and all others are averaged. With a bucket larger than the
model, none is averaged; with a model that fills its buckets exactly, all are. So the bug depends on
a size that people tune.

Seen in: short bucketing code with a test model that exactly fills its buckets.

Kind: a direction bug. Caught by gradients_are_identical.
"""

import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import Trainer, copy_back, one_vector, used_somewhere


class LastBucketForgotten(Trainer):
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


EXHIBIT = Exhibit(LastBucketForgotten, bug="direction", caught_by="gradients_are_identical")
