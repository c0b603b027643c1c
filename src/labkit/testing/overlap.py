"""Check, without a clock, that communication overlaps with backward."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from labkit.testing.agreement import InvariantError, raise_on_every_rank
from labkit.testing.checking import Device, invariant
from labkit.testing.trial import Wrap
from labkit.testing.watch import RecordedCollectives, SameCollectives


@invariant
def communication_overlaps_backward(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """Collectives are launched during backward, and backward continues meanwhile.

    The check looks at the third step, because torch's DDP arranges its buckets in the first, on a
    stack of four Linear(512, 512), 4 MiB. To test that backward continues, it holds the last rank
    back at its first gradient. The other ranks must reach their last gradient while their
    collective still waits for that rank. The only time limit is three seconds for an
    implementation that blocks. The ranks must run on one machine.
    """
    module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(device)
    seed = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(2, 512, generator=seed).to(device)
    watch = RecordedCollectives()
    with _shared_folder() as folder:
        # Before `wrap`, so that its hooks come before the implementation's.
        backward = _HeldBack(module, watch, folder)
        with watched:
            wrapped = wrap(module)
            finish = getattr(wrapped, "finish", lambda: None)
            for _ in range(2):
                wrapped(inputs).square().mean().backward()
                finish()
                module.zero_grad()
        with watch:
            loss = wrapped(inputs).square().mean()
            backward.launched_before = len(watch.launched)
            loss.backward()
            finish()
        raise_on_every_rank(backward.error())


class _HeldBack:
    """Records when gradients arrive, and holds the last rank back at its first one."""

    def __init__(self, module: nn.Module, watch: RecordedCollectives, folder: Path) -> None:
        self.watch, self.folder = watch, folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.launched_before = -1  # collectives launched when backward began; -1: not begun
        self.launched_at: dict[str, int] = {}  # and when each gradient arrived
        self.waited_in_vain = False
        self.parameters = dict(module.named_parameters())
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))

    def _arrived(self, name: str) -> None:
        if self.launched_before < 0:
            return
        if self.rank == self.world_size - 1 and not self.launched_at:
            self._wait_for_the_others()
        self.launched_at[name] = len(self.watch.launched)
        if len(self.launched_at) == len(self.parameters):
            (self.folder / f"rank {self.rank} has all gradients").touch()

    def _wait_for_the_others(self) -> None:
        awaited = [self.folder / f"rank {other} has all gradients" for other in range(self.rank)]
        given_up = time.monotonic() + 3
        while not all(path.exists() for path in awaited):
            if time.monotonic() > given_up:
                self.waited_in_vain = True
                return
            time.sleep(0.002)

    def error(self) -> InvariantError | None:
        last = next(reversed(self.launched_at), None)
        if last is None:
            where, found = "the module that was wrapped", "no gradient arrived in it"
            expected = "one for each of its parameters"
            cause = (
                "what is trained is a copy of the module. Wrap the module itself: its parameters "
                "are those that the optimizer has."
            )
        elif self.launched_at[last] == self.launched_before:
            where = f"{last}.grad, the last to arrive"
            found, expected = "no collective had been launched when it arrived", "at least one"
            cause = (
                "communication begins when backward has ended: one bucket for everything, or an "
                "all-reduce after backward. Launch from a hook, bucket by bucket."
            )
        elif self.waited_in_vain:
            where = "the other ranks' backward"
            found = "waited, in a collective, for this rank's share"
            expected = "went on to its last gradient while the collective was under way"
            cause = (
                "the hook waits for what it launched. Launch with async_op=True, keep the handle, "
                "and wait for all of them when backward has ended."
            )
        else:
            return None
        name = communication_overlaps_backward.__name__
        return InvariantError(name, self.rank, where, found, expected, cause)


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder of rank 0 that all ranks see: a way to signal without a collective."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        yield Path(folder[0])
