"""Name the ranks that a failed or hanging collective is waiting for.

    with report_missing_ranks() as note:
        for step in range(steps):
            note(f"step {step}: computing")
            loss.backward()                      # waits for the other ranks
            note(f"step {step}: averaged")

A rank that waits in a collective does not know where the other ranks are. After the process
group's timeout it learns only that it timed out, or that a connection was closed. So each rank
writes notes about its progress to the process group's key-value store, and a thread of each rank
writes a heartbeat.

A rank that gets an error compares the notes. A rank with a heartbeat and fewer notes is *stuck* at
the place that its last note names. A rank without a heartbeat is *gone*, possibly with its node. A
rank that left the block with fewer notes has *finished early*.
The reporting rank prints this and exits with code 1.

A stuck rank must end, too. The agent of another node sees it as healthy, so torchrun does not end
it. Its own heartbeat thread ends the process when it reads the report of another rank, or when the
store is gone.

Every rank must write the same notes in the same order. The cost is one message to the store per
note and two per second. A report takes up to 3 s after the collective has failed;
`labkit.launch.lab.join_ranks` takes the timeout of the collectives.
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from labkit.launch.supervisor import VICTIM

PULSE = 0.5  # seconds
_PATIENCE = timedelta(seconds=5)
_LEFT = "left"
_COLLECTIVE = re.compile(rf"gloo|NCCL|[Tt]imed out|[Tt]imeout|{VICTIM.pattern}")


class Sign(NamedTuple):
    """What a rank wrote to the store: its number of heartbeats, its number of notes, and the last
    note.
    """

    beats: int
    notes: int
    host: str
    last: str
    finished: bool = False  # it has left the block, without an error


@contextlib.contextmanager
def report_missing_ranks() -> Iterator[Callable[[str], None]]:
    """Give a function that writes a note, and turn an error of a collective into a report.

    It works only under torchrun, within `join_ranks`, and every rank must enter it. While it runs,
    it handles SIGTERM; the handler that was installed before is restored at the end. If a
    collective fails and another rank is missing, it prints the report and exits with code 1. Every
    other error is raised unchanged.
    """
    life: list[str] = [os.urandom(8).hex()]
    dist.broadcast_object_list(life)  # the store outlives a restart; notes must not
    register = _Register(life[0])
    pulse = threading.Thread(target=register.beat, name="pulse", daemon=True)
    pulse.start()
    try:
        yield register.note
        with contextlib.suppress(RuntimeError):  # the store's rank may have left
            register.write(finished=True)
    except RuntimeError as error:
        of_a_collective = isinstance(error, dist.DistError) or _COLLECTIVE.search(str(error))
        if of_a_collective and (missing := register.missing()):
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"{missing}\n({first_line})", file=sys.stderr, flush=True)
            with contextlib.suppress(RuntimeError):
                register.store.set(_LEFT, str(register.rank))
            raise SystemExit(1) from error
        raise
    finally:
        register.ended.set()
        register.restore_handler()
        pulse.join(timeout=2 * _PATIENCE.total_seconds())


def report(rank: int, signs: dict[int, Sign], later: dict[int, Sign]) -> str:
    """The ranks that `rank` waits for, from two looks at the store with heartbeats between; "" if
    none.
    """
    lines = []
    for other, sign in later.items():
        what = f'rank {other} on {sign.host}, last seen at "{sign.last}"'
        behind = sign.notes < later[rank].notes
        if other == rank or (sign.finished and not behind):
            continue
        if sign.finished:
            lines.append(f"finished early: {what}")
        elif sign.beats == signs[other].beats:
            lines.append(f"gone: {what}")
        elif behind:
            lines.append(f"stuck: {what}")
    if not lines:
        return ""
    waited = f'rank {rank} on {later[rank].host} waited in vain at "{later[rank].last}"'
    return "\n".join([waited, *(f"  {line}" for line in lines)])


class _Register:
    """This rank's notes and heartbeat, and a view of those of all ranks."""

    def __init__(self, life: str) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        self.where = f"{host}:{port}"
        # A connection of its own: the process group's may be waiting in a collective.
        store = dist.TCPStore(host, int(port), is_master=False, timeout=_PATIENCE)
        self.store = dist.PrefixStore(f"attendance/{life}", store)
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.asked_to_end = False
        # torchrun also ends this rank when another fails, perhaps before the collective notices.
        # Print the explanation first: torchrun waits for it.
        self.handles_sigterm = threading.current_thread() is threading.main_thread()
        if self.handles_sigterm:
            self.previous_handler = signal.signal(signal.SIGTERM, self._asked)
        self.sign = Sign(0, 0, socket.gethostname(), "the beginning")
        self.write()
        dist.barrier()  # from here on every rank has a sign

    def note(self, text: str) -> None:
        if self.asked_to_end:
            raise SystemExit(128 + signal.SIGTERM)
        self.write(notes=self.sign.notes + 1, last=text)

    def write(self, **changes: Any) -> None:
        with self.lock:
            self.sign = self.sign._replace(**changes)
            self.store.set(str(self.rank), json.dumps(self.sign))

    def beat(self) -> None:
        over_for = 0
        while not self.ended.wait(PULSE):
            try:
                self.write(beats=self.sign.beats + 1)
                over = self.store.check([_LEFT])
            except RuntimeError:
                over = True
            over_for = over_for + 1 if over else 0
            # A waiting rank gets its own error and has time to explain it, less if torchrun is
            # also ending the rank.
            patience = _PATIENCE / 2 if self.asked_to_end else _PATIENCE
            if over_for * PULSE > patience.total_seconds():
                print(
                    f"rank {self.rank} on {self.sign.host} ends: the run is over", file=sys.stderr
                )
                os._exit(1)

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

    def _look(self) -> dict[int, Sign]:
        texts = self.store.multi_get([str(rank) for rank in range(self.world_size)])
        return {rank: Sign(*json.loads(text)) for rank, text in enumerate(texts)}
