"""Name the ranks that a failed or hanging collective is waiting for. Copy it: it needs only torch.

    with report_missing_ranks() as note:
        for step in range(steps):
            note(f"step {step}: computing")
            loss.backward()                      # waits for the other ranks
            note(f"step {step}: averaged")

Each rank writes its notes to the store of its torchrun job, and a thread writes a heartbeat there.
If a collective fails, the rank looks at the store twice. Another rank that has a heartbeat and
fewer notes is *stuck* at the place of its last note. A rank without a heartbeat is *gone*, possibly
with its node. The rank prints what it found and exits with code 1.

A stuck rank must end, too. The agent of another node sees it as healthy, so torchrun does not end
it. Its own heartbeat thread ends the process once another rank has reported, or the store is gone.

Every rank must write the same notes in the same order. It costs one message per note and two per
second. A collective fails after the timeout of its process group; a report takes 3 s more.
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

PULSE = 0.5  # seconds
PATIENCE = 5.0  # seconds: after another rank's report, a waiting rank has time for its own
LEFT, END = "left", "the end"
COLLECTIVE = re.compile(
    r"gloo|NCCL|[Tt]imed out|[Tt]imeout|(closed|reset) by peer|Broken pipe|refused|Read error"
)


class Sign(NamedTuple):
    """What a rank wrote to the store: how many heartbeats and notes, and its last note."""

    beats: int
    notes: int
    host: str
    last: str


@contextlib.contextmanager
def report_missing_ranks() -> Iterator[Callable[[str], None]]:
    """Give a function that writes a note, and turn an error of a collective into a report.

    Every rank must enter it, in its main thread, under torchrun, within the default process group.
    If a collective fails and another rank is missing, it prints the report and exits with code 1.
    Every other error is raised unchanged. While it runs, it handles SIGTERM.
    """
    life = [os.urandom(8).hex()]
    dist.broadcast_object_list(life)  # the store outlives a restart; notes must not
    attendance = _Attendance(life[0])
    # torchrun ends this rank when another fails, perhaps before the collective notices. It waits
    # until the explanation is printed.
    before = signal.signal(signal.SIGTERM, lambda *_: attendance.asked.set())
    pulse = threading.Thread(target=attendance.beat, daemon=True)
    pulse.start()
    try:
        yield attendance.note
        with contextlib.suppress(RuntimeError):  # the store's rank may have left
            attendance.note(END)
    except RuntimeError as error:
        of_a_collective = isinstance(error, dist.DistError) or COLLECTIVE.search(str(error))
        if not of_a_collective or not (missing := attendance.missing()):
            raise
        first_line = str(error).partition("\n")[0]
        print(f"{missing}\n({first_line})", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            attendance.store.set(LEFT, "")
        raise SystemExit(1) from error
    finally:
        attendance.ended.set()
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        pulse.join(timeout=2 * PATIENCE)


def report(rank: int, signs: dict[int, Sign], later: dict[int, Sign]) -> str:
    """The ranks that `rank` waits for, from two looks at the store; empty if there are none."""
    mine = later[rank]
    lines = [f'rank {rank} on {mine.host} timed out at "{mine.last}"']
    for other, sign in later.items():
        finished = sign.last == END and sign.notes > mine.notes
        gone = sign.beats == signs[other].beats and not finished
        if other != rank and (gone or sign.notes < mine.notes):
            state = "gone" if gone else "stuck"
            lines.append(f'  {state}: rank {other} on {sign.host}, last seen at "{sign.last}"')
    return "\n".join(lines) if len(lines) > 1 else ""


class _Attendance:
    """This rank's notes and heartbeat, and a view of those of all ranks."""

    def __init__(self, life: str) -> None:
        self.rank = dist.get_rank()
        self.host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of its own: the process group's may be waiting in a collective.
        patience = timedelta(seconds=PATIENCE)
        store = dist.TCPStore(self.host, port, is_master=False, timeout=patience)
        self.store = dist.PrefixStore(f"attendance/{life}", store)
        self.keys = [str(rank) for rank in range(dist.get_world_size())]
        self.lock, self.ended, self.asked = threading.Lock(), threading.Event(), threading.Event()
        self.sign = Sign(0, 0, socket.gethostname(), "the beginning")
        self.write()
        dist.barrier()  # from here on every rank has a sign

    def note(self, text: str) -> None:
        if self.asked.is_set():
            raise SystemExit(128 + signal.SIGTERM)
        self.write(notes=self.sign.notes + 1, last=text)

    def write(self, **changes: Any) -> None:
        with self.lock:
            self.sign = self.sign._replace(**changes)
            self.store.set(str(self.rank), json.dumps(self.sign))

    def beat(self) -> None:
        over_for = 0.0
        while not self.ended.wait(PULSE):
            try:
                self.write(beats=self.sign.beats + 1)
                over = self.store.check([LEFT])
            except RuntimeError:
                over = True
            over_for = over_for + PULSE if over else 0.0
            if over_for > PATIENCE:
                print(f"rank {self.rank} ends: the run is over", file=sys.stderr, flush=True)
                os._exit(1)

    def missing(self) -> str:
        try:
            signs = self.look()
            time.sleep(4 * PULSE)
            return report(self.rank, signs, self.look())
        except RuntimeError:
            return (
                f'rank {self.rank} on {self.sign.host} timed out at "{self.sign.last}"\n'
                f"  gone: rank 0, its node or the network to it ({self.host} does not answer)"
            )

    def look(self) -> dict[int, Sign]:
        texts = self.store.multi_get(self.keys)
        return {rank: Sign(*json.loads(text)) for rank, text in enumerate(texts)}
