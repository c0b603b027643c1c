"""What becomes of submissions when the kernel that runs their checks fails, and not they."""

import time

import pytest
from grader_notebooks import first_assignment

from grader import judge
from grader.check import GraderError
from grader.grade import grade_many
from grader.merge import Submission

STUDENTS = ("ada", "bob", "eve")
ENDS_THE_KERNEL = """
import os, sys, threading, time
from pathlib import Path

def end_after_two_checks():
    notes, ended = Path(os.environ["GRADER_CASES"], "notes"), Path({mark!r})
    while not ended.exists():
        if notes.exists() and len(notes.read_text().splitlines()) >= 2:
            ended.touch()
            os._exit(1)
        time.sleep(0.005)

if "ipykernel_launcher" in " ".join(sys.orig_argv):
    threading.Thread(target=end_after_two_checks, daemon=True).start()
"""


def _graded(server):
    assignment = first_assignment()
    keys = [(name, Submission(assignment.keys())) for name in STUDENTS]
    return list(grade_many(keys, assignment, server))


def _spoil_starts(monkeypatch, spoiled):
    """The first `spoiled` kernels cannot write the file that tells where they are reached."""
    environment, starts = judge._Run._environment, []

    def spoil(run):
        starts.append(run)
        spoils = {"JUPYTER_RUNTIME_DIR": "/proc/nowhere"} if len(starts) <= spoiled else {}
        return environment(run) | spoils

    monkeypatch.setattr(judge._Run, "_environment", spoil)
    return starts


def test_a_kernel_that_does_not_start_costs_no_submission_anything(server, monkeypatch):
    starts = _spoil_starts(monkeypatch, spoiled=1)
    results = _graded(server)
    assert [(result.student, result.score) for result in results] == [(n, 10) for n in STUDENTS]
    assert not any(result.needs_human for result in results)
    assert len(starts) == 2


def test_a_machine_that_starts_no_kernel_is_blamed_with_what_nbval_said(server, monkeypatch):
    starts = _spoil_starts(monkeypatch, spoiled=100)
    with pytest.raises(GraderError, match=r"(?s)own kernel did not start: .*/proc/nowhere"):
        _graded(server)
    assert len(starts) == 3


def test_a_kernel_that_ends_leaves_one_submission_open_and_no_other(server, monkeypatch, tmp_path):
    """nbval waits for a dead kernel's answer, and then calls all further cells failed."""
    text = ENDS_THE_KERNEL.format(mark=str(tmp_path / "ended"))
    (tmp_path / "sitecustomize.py").write_text(text)
    environment = judge._Run._environment

    def ends(run):
        inherited = environment(run)
        return inherited | {"PYTHONPATH": f"{tmp_path}:{inherited['PYTHONPATH']}"}

    monkeypatch.setattr(judge._Run, "_environment", ends)
    started = time.monotonic()
    ada, bob, eve = _graded(server)
    assert (tmp_path / "ended").exists()
    assert ada.needs_human
    open_checks = {check.needs_human for check in ada.checks if check.needs_human}
    assert open_checks == {"the check did not come to an end"}
    assert ada.checks[0].score
    assert not ada.checks[0].needs_human
    assert (bob.score, bob.needs_human) == (eve.score, eve.needs_human) == (10, False)
    assert time.monotonic() - started < 60
