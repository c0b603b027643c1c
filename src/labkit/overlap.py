"""Does communication overlap with backward? A check without a clock."""

import os
import tempfile
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from labkit.agreement import InvariantError, raise_on_every_rank
from labkit.checking import Device, invariant
from labkit.trial import Wrap
from labkit.watch import RecordedCollectives, SameCollectives


@invariant
def communication_overlaps_backward(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """Collectives are launched during backward, and backward goes on meanwhile.

    Looked at in the third step (torch's DDP arranges its buckets in the first), on a stack of
    four Linear(512, 512), 4 MiB. The second half is tried by holding the last rank back at its
    first gradient: the others must reach their last one while their collective still waits for
    that rank. No clock decides, except that a blocked implementation is given up after three
    seconds.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(device)
    watch = RecordedCollectives()
    # Before `wrap`, so that its hooks come before the implementation's.
    backward = _HeldBack(module, watch, rank, world_size)
    inputs = torch.randn(2, 512, generator=torch.Generator().manual_seed(rank)).to(device)
    with watched:
        wrapped = wrap(module)
        finish = getattr(wrapped, "finish", _nothing)
        for _ in range(2):
            wrapped(inputs).square().mean().backward()
            finish()
            module.zero_grad()
    with watch:
        loss = wrapped(inputs).square().mean()
        backward.begins()
        loss.backward()
        finish()
    raise_on_every_rank(backward.error())


class _HeldBack:
    """Notes when gradients arrive, and holds the last rank back at its first one."""

    def __init__(
        self, module: nn.Module, watch: RecordedCollectives, rank: int, world_size: int
    ) -> None:
        self.watch, self.rank, self.world_size = watch, rank, world_size
        self.launched_before = -1  # collectives launched when backward began; -1: not begun
        self.launched_at: dict[str, int] = {}  # and when each gradient arrived
        self.waited_in_vain = False
        self.parameters = dict(module.named_parameters())
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))
        path = [os.path.join(tempfile.gettempdir(), f"labkit-overlap-{uuid.uuid4()}")]
        dist.broadcast_object_list(path)  # rank 0's
        self.store = dist.FileStore(path[0], world_size)  # the last one to go removes the file

    def begins(self) -> None:
        self.launched_before = len(self.watch.launched)

    def _arrived(self, name: str) -> None:
        if self.launched_before < 0:
            return
        if self.rank == self.world_size - 1 and not self.launched_at:
            others = [f"rank {other} has all" for other in range(self.rank)]
            try:
                self.store.wait(others, timedelta(seconds=3))
            except RuntimeError:  # of FileStore; other stores raise its subclass DistStoreError
                self.waited_in_vain = True
        self.launched_at[name] = len(self.watch.launched)
        if len(self.launched_at) == len(self.parameters):
            self.store.set(f"rank {self.rank} has all", "yes")

    def error(self) -> InvariantError | None:
        last = list(self.launched_at)[-1]
        if self.launched_at[last] == self.launched_before:
            return InvariantError(
                "communication_overlaps_backward",
                self.rank,
                f"{last}.grad, the last to arrive",
                "no collective had been launched when it arrived",
                "at least one",
                "communication begins when backward has ended: one bucket for everything, or an "
                "all-reduce after backward. Launch from a hook, bucket by bucket.",
            )
        if self.waited_in_vain:
            return InvariantError(
                "communication_overlaps_backward",
                self.rank,
                "the other ranks' backward",
                "waited, in a collective, for this rank's share",
                "went on to its last gradient while the collective was under way",
                "the hook waits for what it launched. Launch with async_op=True, keep the handle, "
                "and wait for all of them when backward has ended.",
            )
        return None


def _nothing() -> None:
    """Stands in for a `finish` that an implementation does not have."""
