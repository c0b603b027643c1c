"""The watcher ends when the run has ended, also if a process cannot say so, and reads little."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor.journals import fact, window

from ddp_doctor.__main__ import _close
from ddp_doctor.facts import journal
from ddp_doctor.facts.journal import Journal
from ddp_doctor.facts.types import EndFact, FailedFact, GroupFact, ProcessFact, WindowFact, no_facts
from ddp_doctor.observe.session import Session
from ddp_doctor.options import Options
from ddp_doctor.report.report import report
from ddp_doctor.run import watcher

Elsewhere = Callable[[Path], Journal]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """A journal as a process of another host would write it."""

    def write(folder: Path) -> Journal:
        with monkeypatch.context() as other:
            other.setattr(socket, "gethostname", lambda: "elsewhere")
            one = Journal(folder)
        one.set_status("all_reduce at train.py:7")
        return one

    return write


class Clock:
    """In the place of `time`: waiting takes no time, and lets `meanwhile` act."""

    def __init__(self, meanwhile: Callable[[float], object] = lambda now: None) -> None:
        self.now, self.meanwhile = 0.0, meanwhile

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1000, "it waits forever"
        self.meanwhile(self.now)


DEAD = 2**22  # no process has this id


def test_a_killed_rank_of_another_host_does_not_keep_the_watcher(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "time", Clock())
    elsewhere(tmp_path)
    watcher._wait(tmp_path, Options(hang_after=0), DEAD)


def test_a_rank_of_another_host_that_still_writes_keeps_the_watcher_until_it_ends(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = elsewhere(tmp_path)

    def write(now: float) -> None:
        if now < 500:
            remote.set_status(f"step at {now}")
        else:
            remote.set_status("ended", ended=True)

    clock = Clock(write)
    monkeypatch.setattr(watcher, "time", clock)
    watcher._wait(tmp_path, Options(hang_after=0), DEAD)
    assert 500 <= clock.now < 502


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in folder.iterdir():
        os.utime(path, (then, then))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_with_the_address_and_id_of_an_earlier_one_does_not_read_that_ones_journals(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(tmp_path).set_status("ended", ended=True)
    age(tmp_path, 120)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: None)
    monkeypatch.setattr("atexit.register", lambda _: None)
    session = SimpleNamespace(options=Options(), run_folder=tmp_path)
    watcher.start_watcher(session)  # type: ignore[arg-type]
    assert names(tmp_path) == set()


def test_what_may_be_a_rank_of_this_run_is_never_removed(
    tmp_path: Path, elsewhere: Elsewhere
) -> None:
    remote = elsewhere(tmp_path)
    here = Journal(tmp_path)
    here.set_status("running")
    everything = names(tmp_path)
    age(tmp_path, 1800)  # the remote rank has waited for rank 0; the local one is alive
    journal.remove_old(tmp_path)
    assert names(tmp_path) == everything
    remote.set_status("ended", ended=True)  # just now
    journal.remove_old(tmp_path)
    assert names(tmp_path) == everything


def test_a_process_with_the_host_and_id_of_an_earlier_one_begins_an_empty_journal(
    tmp_path: Path,
) -> None:
    first = Journal(tmp_path)
    first.write("end", raised=True)
    first.set_status("ended", ended=True)
    Journal(tmp_path).write("process")
    (one,) = journal.read(tmp_path)
    assert one.facts == no_facts() | {"process": [{}]}
    assert not (one.status and one.status.ended)


Lines = list[tuple[str, Any]]  # kind and fact
END = ("end", fact(EndFact))


def write_run(folder: Path, facts: dict[int, Lines], doing: dict[int, str]) -> None:
    """Two ranks of this host, under the ids of this process and of its parent: both are alive."""
    for rank, pid in ((0, os.getppid()), (1, os.getpid())):
        one = Journal(folder)
        one.write("process", **fact(ProcessFact, started=1.0))
        one.write("group", **fact(GroupFact, rank=rank, world=2))
        for kind, given in facts.get(rank, []):
            one.write(kind, **given)
        one.set_status(doing[rank], ended=doing[rank] == "ended")
        for suffix in (".jsonl", ".now"):
            path = folder / f"{one.name}{suffix}"
            path.rename(folder / f"{socket.gethostname()}-{pid}{suffix}")


BUSY = {0: "running", 1: "barrier at train.py:7"}


def test_a_report_while_ranks_wait_for_one_that_has_ended_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "journals" / "run"
    write_run(run, {0: [END]}, BUSY | {0: "ended"})
    report(run, Options(), live=True)
    assert "ERROR Ranks wait for a missing rank" in capsys.readouterr().err


@pytest.mark.parametrize("raised", [True, False])
def test_nothing_is_said_about_a_script_that_an_error_or_its_help_ended_before_it_trained(
    raised: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(Options(folder=str(tmp_path)), tmp_path / "journals" / "run")
    _close(session, session.options, SystemExit(0) if raised else None, 0)
    report(session.run_folder, session.options)
    assert ("no rank was observed" in capsys.readouterr().err) == (not raised)


def test_quiet_prints_nothing_if_nothing_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "journals" / "run"
    report(run, Options(quiet=True))
    ends = {rank: [END] for rank in (0, 1)}
    write_run(run, ends, {0: "ended", 1: "ended"})
    report(run, Options(quiet=True))
    assert capsys.readouterr().err == ""


def test_a_process_that_is_no_rank_ends_after_its_report_is_written(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from ddp_doctor.observe.session import Session\n"
        "from ddp_doctor.options import Options\n"
        "from ddp_doctor.run.watcher import start_watcher\n"
        "start_watcher(Session(Options(json='report.json'), Path('journals/run')))\n"
    )
    (tmp_path / "journals" / "run").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    # Not captured: the watcher has the same standard error, and would be waited for.
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "report.json").exists()


def test_neither_text_nor_page_calls_a_script_right_that_an_error_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"type": "ValueError", "text": "bad batch", "place": "train.py:9"}
    end = ("end", fact(EndFact, raised=True, error=error))
    run = tmp_path / "journals" / "run"
    write_run(run, {rank: [step(0, rank), end] for rank in (0, 1)}, {0: "ended", 1: "ended"})
    report(run, Options())
    for said in (capsys.readouterr().err, (tmp_path / "report.txt").read_text()):
        words = " ".join(said.split())
        assert "rank 0 ended with ValueError: bad batch at train.py:9" in words
        assert "No error" not in said


def step(number: int, rank: int = 0) -> tuple[str, WindowFact]:
    mine = {"weight": 1.0, "bias": 2.0}
    local = {"weight": 0.5 + rank, "bias": 1.0 + 2 * rank}
    one = window([4], [1.0], mine, local, n=number, world=2)
    one["backwards"][0]["values"] = [float(rank)]
    return "window", one


STOPPED = ("failed", fact(FailedFact, error="KeyError: 'call'"))


@pytest.mark.parametrize(
    ("steps", "stopped", "problem"),
    [
        ([2, 2], [], ""),
        ([0, 0], [], "no optimizer step was observed on all ranks"),
        ([1, 0], [], "no optimizer step was observed on all ranks"),
        ([1, 1], [STOPPED], "the doctor stopped on rank 0; the doctor stopped on rank 1"),
    ],
)
def test_fail_on_passes_only_if_steps_were_checked_to_the_end(
    steps: list[int], stopped: Lines, problem: str, tmp_path: Path
) -> None:
    run = tmp_path / "journals" / "run"
    facts = {
        rank: [*(step(number, rank) for number in range(steps[rank])), *stopped, END]
        for rank in (0, 1)
    }
    write_run(run, facts, {0: "ended", 1: "ended"})
    result = report(run, Options(quiet=True))
    assert result.worst is None
    assert "; ".join(result.verdict()["unchecked"]) == problem
