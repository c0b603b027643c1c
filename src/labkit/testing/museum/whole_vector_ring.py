"""Sends whole vectors around a ring, and lets each rank add them in order of arrival.

Claims: a ring all-reduce in ten lines.

The bug: rank r adds in the order r, r − 1, r − 2, …, a different one on every rank, and
floating-point sums depend on their order. The ranks' averages differ in the last bits, and so do
their weights. It is also slow: each rank sends (W − 1) whole vectors, a chunked ring at most two.

Symptom: none on two ranks, because a + b = b + a. From three ranks on, replicas differ by rounding
errors that grow with the steps. At a branch on a value (a clip, a loss scale, early stopping) ranks
may take different paths.

Seen in: tutorials that build collectives from send and receive.

Kind: drift. Caught by gradients_are_identical.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import Trainer, used_somewhere


class WholeVectorRing(Trainer):
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


EXHIBIT = Exhibit(WholeVectorRing, bug="drift", caught_by="gradients_are_identical", ranks_needed=3)
