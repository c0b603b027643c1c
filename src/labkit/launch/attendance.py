"""Who has not come: when a collective fails or waits in vain, the ranks that it waits for, by name.

    with attendance() as note:
        for step in range(steps):
            note(f"step {step}: computing")
            loss.backward()                      # waits for the others
            note(f"step {step}: averaged")

A rank that waits in a collective learns nothing of the others: after the process group's timeout it
is told that it timed out, or that a connection was closed. So each rank leaves notes of where it is
in the key-value store of the process group, beside a pulse that a thread of its own keeps up.
Whoever gets an error compares: a rank with a pulse whose notes are fewer is *stuck* where its last
note says; one without a pulse is *gone*, and with it perhaps its node. Then it says so and exits
with code 1.
The pulse of a rank that is stuck itself hears of it, or finds the store gone, and ends the process:
torchrun cannot, since to the agent of another node such a rank looks healthy.

Every rank must leave the same notes in the same order. Cost: one message to the store a note, and
one a second. An answer takes up to 3 s after the collective has failed; `labkit.launch.lab.joined`
takes the timeout of the collectives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

PULSE = 0.5  # seconds
_PATIENCE = timedelta(seconds=5)
_LEFT = "left"


class Sign(NamedTuple):
    """What a rank has left in the store: its pulse's beats, its notes' number, and the last one."""

    beats: int
    notes: int
    host: str
    last: str


@contextlib.contextmanager
def report_missing_ranks() -> Iterator[Callable[[str], None]]:
    """Gives the function that leaves a note. Turns an error of a collective into who is missing.

    Only under torchrun, within `joined`; every rank has to enter. Exits, with code 1, for any
    RuntimeError that a missing rank explains; one that does not is raised as it was.
    """
    life: list[str] = [os.urandom(8).hex()]
    dist.broadcast_object_list(life)  # the store outlives a restart; notes must not
    register = _Register(life[0])
    pulse = threading.Thread(target=register.beat, name="pulse", daemon=True)
    pulse.start()
    try:
        yield register.note
    except RuntimeError as error:
        if missing := register.missing():
            print(f"{missing}\n({_first_line(error)})", file=sys.stderr, flush=True)
            register.leave()
            raise SystemExit(1) from error
        raise
    finally:
        register.ended.set()
        register.restore_handler()
        pulse.join(timeout=2 * _PATIENCE.total_seconds())


def report(rank: int, signs: dict[int, Sign], later: dict[int, Sign]) -> str:
    """Which ranks `rank` waits for, from two looks at the store with pulses between; "" if none."""
    lines = []
    for other, sign in later.items():
        what = f'rank {other} on {sign.host}, last seen at "{sign.last}"'
        if other == rank:
            continue
        if sign.beats == signs[other].beats:
            lines.append(f"gone: {what}")
        elif sign.notes < later[rank].notes:
            lines.append(f"stuck: {what}")
    if not lines:
        return ""
    waited = f'rank {rank} on {later[rank].host} waited in vain at "{later[rank].last}"'
    return "\n".join([waited, *(f"  {line}" for line in lines)])


class _Register:
    """The notes and the pulse of this rank, and a look at those of all."""

    def __init__(self, life: str) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        host, port = self.where.rsplit(":", 1)
        # A connection of its own: the process group's may be waiting in a collective.
        store = dist.TCPStore(host, int(port), is_master=False, timeout=_PATIENCE)
        self.store = dist.PrefixStore(f"attendance/{life}", store)
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.asked_to_end = False
        # torchrun ends this rank, too, when another has failed, perhaps before the collective has
        # noticed: the explanation comes first, for which torchrun has the patience.
        self.handles_sigterm = threading.current_thread() is threading.main_thread()
        if self.handles_sigterm:
            self.previous_handler = signal.signal(signal.SIGTERM, self._asked)
        self.sign = Sign(0, 0, socket.gethostname(), "the beginning")
        self._write()
        dist.barrier()  # from here on every rank has a sign

    def note(self, text: str) -> None:
        if self.asked_to_end:
            raise SystemExit(128 + signal.SIGTERM)
        with self.lock:
            self.sign = self.sign._replace(notes=self.sign.notes + 1, last=text)
            self._write()

    def beat(self) -> None:
        over_for = 0
        while not self.ended.wait(PULSE):
            with self.lock:
                self.sign = self.sign._replace(beats=self.sign.beats + 1)
                try:
                    self._write()
                    over = self.store.check([_LEFT])
                except RuntimeError:
                    over = True
            over_for = over_for + 1 if over else 0
            # A rank that only waits gets an error of its own, and has the time to explain it: less
            # of it when torchrun, too, wants the rank to end.
            patience = _PATIENCE / 2 if self.asked_to_end else _PATIENCE
            if over_for * PULSE > patience.total_seconds():
                print(
                    f"rank {self.rank} on {self.sign.host} ends: the run is over", file=sys.stderr
                )
                os._exit(1)

    def leave(self) -> None:
        with self.lock, contextlib.suppress(RuntimeError):
            self.store.set(_LEFT, str(self.rank))

    def restore_handler(self) -> None:
        if self.handles_sigterm:
            # None: installed by C code, which Python cannot put back.
            signal.signal(signal.SIGTERM, self.previous_handler or signal.SIG_DFL)

    def missing(self) -> str:
        try:
            signs = self._look()
            time.sleep(4 * PULSE)
            return report(self.rank, signs, self._look())
        except RuntimeError:
            return (
                f'rank {self.rank} on {self.sign.host} waited in vain at "{self.sign.last}"\n'
                f"  gone: rank 0, its node or the network to it ({self.where} does not answer)"
            )

    def _asked(self, *_: object) -> None:
        self.asked_to_end = True

    def _write(self) -> None:
        self.store.set(str(self.rank), "\n".join(map(str, self.sign)))

    def _look(self) -> dict[int, Sign]:
        with self.lock:
            texts = self.store.multi_get([str(rank) for rank in range(self.world_size)])
        signs = {}
        for rank, text in enumerate(texts):
            beats, notes, host, last = text.decode().split("\n", 3)
            signs[rank] = Sign(int(beats), int(notes), host, last)
        return signs


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
