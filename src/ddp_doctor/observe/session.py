"""Observing in one process: what is on, what is written down, how it ends.

A session observes every optimizer step fully at first, then a sample of them. `observing` says
which kind the current step is; observers check it before they do anything that costs time. Steps
are counted per process, and ranks take the same number of them, so all ranks sample the same ones.
"""

import atexit
import functools
import multiprocessing.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddp_doctor.facts.journal import Journal, read_statuses
from ddp_doctor.facts.places import is_users, shown, stack
from ddp_doctor.facts.types import EndFact, ErrorFact, FailedFact, ProcessFact, StuckFact
from ddp_doctor.options import Options, say

if TYPE_CHECKING:
    from ddp_doctor.observe.patching import Patches

LOOK_AGAIN = 4  # steps that are observed after a change


class Record(Protocol):
    """The methods that a session calls on its recorder, `observe.recorder.Recorder`."""

    def begin(self) -> None:
        """Forget everything: this process has seen nothing yet."""

    def finish(self) -> None:
        """Write down what is only known at the end."""


class Session:
    """The doctor in one process. One object per process, made by `run.start.start`.

    Errors inside observers never reach the run: `guard` catches them, says one line, and ends the
    observation.
    """

    def __init__(self, options: Options, run_folder: Path) -> None:
        self.options = options
        self.run_folder = run_folder
        self.over = False
        self.leads = False  # whether this process started the watcher
        self._inside = threading.local()
        self.patches: Patches | None = None
        self.recorder: Record | None = None  # set by `observe.install`
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Nothing has been seen yet. A forked process is another one, with a journal of its own."""
        if self.over:
            return
        self.journal: Journal | None = None
        self._facts_before: list[tuple[str, dict[str, Any]]] = []
        self._closed = False
        if self.recorder is not None:
            self.recorder.begin()
        self.step_count = self._look_until = 0
        self.observing = True

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, skipped while the doctor itself computes or is over; its errors end it."""

        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            inside = self._inside
            if self.over or getattr(inside, "yes", False):
                return None
            inside.yes = True
            try:
                return function(*args)
            except Exception as error:
                self.fail(error)
                return None
            finally:
                inside.yes = False

        return guarded

    def fail(self, error: BaseException) -> None:
        """Stop observing because of an error of our own, and say so once."""
        if self.over:
            return
        self.over = True
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        at = (
            f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
        )
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        say(f"stopped observing ({text}{at}). Your run goes on.")
        if self.journal is not None:
            self.journal.write("failed", **FailedFact(error=text, at=at))

    def write(self, kind: str, **fact: Any) -> None:
        """Write a fact. A process that is not a rank (no group, no step) never opens a file.

        Before the journal is open, the first 100 facts and the last 100 are kept.
        """
        if self.journal is None:
            self._facts_before.append((kind, fact))
            if len(self._facts_before) > 200:
                del self._facts_before[100]
            return
        self.journal.write(kind, **fact)
        if self.journal.problem is not None:
            self.fail(self.journal.problem)

    def set_status(self, text: str) -> None:
        if self.journal is not None:
            self.journal.set_status(text)

    def open(self) -> None:
        """Open this process's journal: from now on it counts as one of the run's processes."""
        if self.journal is not None:
            return
        try:
            journal = Journal(self.run_folder)
        except OSError as error:
            self.fail(error)
            return
        self.journal = journal
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        journal.write("process", **ProcessFact(started=time.time(), environment=environment))
        for kind, fact in self._facts_before:
            journal.write(kind, **fact)
        self._facts_before.clear()
        atexit.register(self._close_at_exit)
        if (
            multiprocessing.parent_process() is not None
        ):  # a forked one leaves without exit handlers
            multiprocessing.util.Finalize(None, self._close_at_exit, exitpriority=10)
        threading.Thread(target=self._watch_main_thread, name="ddp-doctor", daemon=True).start()

    def next_step(self, optimizers: int, full: bool = False) -> None:
        """A step has ended: decide whether the next one is observed.

        `optimizers` is how many of them step in turn. `full`: no more steps are written down.
        """
        self.step_count += 1
        turn = max(1, optimizers)
        first, every = self.options.first * turn, self.options.every * turn
        if self.step_count >= 40 * every:
            every *= 10
        sampled = self.step_count < max(first, self._look_until) or self.step_count % every < turn
        self.observing = sampled and not full
        if self.options.leave_after and self.step_count >= self.options.leave_after * turn:
            self._leave()

    def _leave(self) -> None:
        """End this process, once all ranks are here: what they still do is not wanted."""
        self._inside.yes = False  # an observer calls this, and the last facts are wanted
        self.close()
        until = time.monotonic() + 10.0
        while (
            any(not journal.ended for journal in read_statuses(self.run_folder))
            and time.monotonic() < until
        ):
            time.sleep(0.05)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def look_again(self) -> None:
        """Observe the next steps, whatever is due: something has changed."""
        self._look_until = self.step_count + LOOK_AGAIN

    def _close_at_exit(self) -> None:
        """Close, with the exception that ends the process."""
        self.close(getattr(sys, "last_value", None) or _of_a_started_process())

    def close(self, error: BaseException | None = None) -> None:
        """Write the last facts. Idempotent; `error` is what ended the training."""
        if self._closed or self.journal is None or self.journal.process != os.getpid():
            return
        self._closed = True
        if not self.over and self.recorder is not None:
            self.guard(self.recorder.finish)()
        journal = self.journal
        fact = EndFact(raised=error is not None, during=journal.text, cut=journal.cut)
        if error is not None and not isinstance(error, SystemExit):
            fact["error"] = _described(error)
        self.journal.write("end", **fact)
        self.journal.set_status("ended", ended=True)

    def _watch_main_thread(self) -> None:
        """Write down where the main thread is once it has done the same thing for 3 seconds."""
        main = threading.main_thread().ident
        written = 0.0
        while not self._closed and self.journal is not None:
            time.sleep(0.5)
            since = self.journal.since
            if self.over or time.time() - since < 3.0 or since == written:
                continue
            written = since
            frame = sys._current_frames().get(main) if main is not None else None
            fact = StuckFact(since=since, stack=stack(frame, 30))
            self.journal.write("stuck", **fact)


def _of_a_started_process() -> BaseException | None:
    """The exception that ends a process of multiprocessing; the interpreter never keeps it.

    It still propagates when the process's finalizers run. `torch.multiprocessing.spawn` reports it
    to the parent and exits instead: then it is what the exit was raised in.
    """
    if multiprocessing.parent_process() is None:
        return None
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and error.code and error.__context__ is not None:
        return error.__context__
    return error


def _described(error: BaseException) -> ErrorFact:
    """Type, message, and the user's innermost line."""
    where = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if is_users(name):
            where = f"{shown(name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # what a terminal shows in bold
    return {"type": type(error).__name__, "text": text[:2000], "place": where}
