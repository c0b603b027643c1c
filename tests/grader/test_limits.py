"""Limits hold for every teacher: memory, threads, time, and what an answer may hold."""

import csv
import io
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from grader_notebooks import first_assignment
from processes import all_gone, processes_with

from grader import sandbox
from grader.answer_key import Outcome, run_check
from grader.grade import CheckResult, Result
from grader.outputs import observation, text_of
from grader.report import folder_name, sentence_of, write_csv, write_feedback
from grader.sandbox import Forks, Sandbox, SandboxError

ESCAPES = """
import ctypes, mmap, os, threading

def on_rank(student, given):
    libc, count, end = ctypes.CDLL(None), 0, threading.Event()
    def tried(action):
        try:
            return bool(action())
        except OSError:
            return False
    def of_zeros():
        with open("/dev/zero", "r+b") as file:
            return mmap.mmap(file.fileno(), 1 << 20)
    found = {
        "a user namespace": libc.unshare(0x10000000) == 0,
        "one by clone": libc.syscall({"x86_64": 56}.get(os.uname().machine, 220), 0x10000011, 0, 0, 0, 0) >= 0,
        "keys of the login": libc.syscall({"x86_64": 250}.get(os.uname().machine, 219), 1, 0) >= 0,
        "System V": libc.shmget(0, 1 << 20, 0o1600) >= 0,
        "shared": tried(lambda: mmap.mmap(-1, 1 << 20)),
        "zeros": tried(of_zeros),
        "memfd": tried(lambda: os.memfd_create("x")),
    }
    return {name: str(got) for name, got in found.items()}
"""  # noqa: E501
THREADS = """
import threading, time

def on_rank(student, given):
    threading.stack_size(32768)
    count = 0
    try:
        for count in range(3000):
            threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
    except RuntimeError:
        pass
    time.sleep(1)
    return {"threads": count}
"""
STOPS = """
import os, signal, time

def on_rank(student, given):
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(100)
"""


@pytest.fixture(params=["root of the system, where one runs this", "any other teacher"])
def teacher(request, monkeypatch):
    if request.param == "any other teacher":  # namespaces of a user's own, also for root
        monkeypatch.setattr(sandbox.walls, "is_root", lambda: False)
    forks = Forks(False)
    monkeypatch.setitem(sandbox.FORKS, False, forks)
    yield request.param
    forks.end()


def outcome_of(source: str, seconds: float = 12) -> Outcome:
    check = replace(first_assignment().checks[0], source=source)
    with Sandbox() as one:
        [outcome] = run_check(one, check, [], [[{}, {}]], 0, seconds=seconds)
    return outcome


@pytest.mark.slow
def test_no_namespace_no_key_and_no_memory_that_no_process_owns(teacher):
    found = outcome_of(ESCAPES).results
    assert found is not None
    assert all(got == dict.fromkeys(got, "False") for got in found)


@pytest.mark.slow
def test_threads_are_limited_and_none_beyond_that_survives(teacher):
    outcome = outcome_of(THREADS)
    counted = [one["threads"] for one in outcome.results or ()]
    assert sum(counted) < 256 if counted else "too many" in outcome.stopped["states"]


@pytest.mark.slow
def test_a_stopped_supervisor_costs_a_check_its_own_limit():
    outcome_of(ESCAPES)  # starts what is forked
    before = time.monotonic()
    assert outcome_of(STOPS, seconds=3).timed_out
    assert time.monotonic() - before < 30


# Programs in place of systemd-run, and what is then in force for all together.
SYSTEMD_RUN = {
    "lends one": (
        """
echo "$@" >> "$0.said"
own="ROOT$(sed -n s/^0:://p /proc/self/cgroup)"
mkdir -p "$own"
while :; do
    case "$1" in
        -p) shift; case "$1" in
            MemoryMax=*) echo "${1#*=}" > "$own/memory.max";;
            TasksMax=*) echo "${1#*=}" > "$own/pids.max";;
        esac;;
        --*) ;;
        *) exec "$@";;
    esac
    shift
done
""",
        "778 processes and threads, by a cgroup",
    ),
    "takes limits that it cannot set": (
        'shift 10; [ "$1" = --user ] && shift; exec "$@"',
        "no lim",
    ),
    "is silent": ("exec sleep 1000", "no limit"),
}


@pytest.mark.parametrize("systemd", SYSTEMD_RUN)
def test_a_cgroup_holds_all_where_systemd_lends_one(systemd, tmp_path, monkeypatch, teacher):
    program, (source, said) = tmp_path / "systemd-run", SYSTEMD_RUN[systemd]
    program.write_text("#!/bin/sh\n" + source.replace("ROOT", str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sandbox, "_CGROUPS", str(tmp_path))
    monkeypatch.setattr(sandbox, "_TRYING", 0.3 if systemd == "is silent" else 60)
    sandbox.FORKS[False].at_once = 3
    if systemd == "lends one":
        assert outcome_of(ESCAPES).results is not None
        trial, run = Path(f"{program}.said").read_text().splitlines()
        assert "-p MemoryMax=" in run
        assert "-p TasksMax=778 " in run
        assert "bwrap --unshare" in run
        assert trial.startswith(run[: run.index("TasksMax")])
        assert (" --user" in run) == (not sandbox.walls.is_root())
    else:
        sandbox.FORKS[False].new().close()
    assert said in sandbox.FORKS[False].in_force


def test_a_program_that_is_ended_while_it_starts_leaves_no_process(monkeypatch):
    monkeypatch.setenv("STARTED_BY", mark := f"test {os.getpid()}")
    for _ in range(20):
        forks = Forks(False)
        forks.new().close()
        forks.end()
    gone = all_gone(mark)
    for process in processes_with(mark):
        process.kill()
    assert gone


def test_bubblewraps_own_sentence_is_shown_before_anything_is_graded(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sandbox, "_program", lambda: str(program))
    monkeypatch.setitem(sandbox.FORKS, False, Forks(False))
    with Sandbox() as one, pytest.raises(SandboxError, match=r"uid map: Perm.*AppArmor"):
        one.ask({"call": "draw", "draws": []}, 10)


def test_a_table_of_a_long_answer_has_an_end_and_differs_from_another():
    one, other = ({str(n): n for n in range(20_000)} for _ in range(2))
    other["19999"] = 0
    assert len(text_of([one], None, 1e-4)) < 110_000
    assert text_of([one], None, 1e-4) != text_of([other], None, 1e-4)


def test_a_right_answer_with_one_more_key_is_told_what_is_too_much():
    own, key = {"a": np.ones(2, "f4") * 1.000001, "b": np.ones(1)}, {"a": np.ones(2, "f4")}
    assert observation([own], [key], 1e-4) == "Rank 0 returned b, which is too much."


def test_nobody_lands_in_anothers_folder():
    names = ["O'Brien", folder_name("O'Brien")]
    assert len({folder_name(name) for name in names}) == 2


def test_a_table_is_readable_whatever_a_note_or_a_line_holds(tmp_path):
    checks = [CheckResult("c", 1, 0, True, sentence="no\x1b[2J", line="\x1b]0;title\x07")]
    result = Result("s", "a", "A", 1, checks, notes=["x" * 190_000])
    write_csv([result], tmp_path / "grades.csv")
    text = (tmp_path / "grades.csv").read_text()
    [row] = csv.DictReader(io.StringIO(text))
    assert len(row["notes"]) <= 8_000
    assert "\x1b" not in text + sentence_of(checks[0])


def test_a_students_name_is_no_formula_in_the_table_and_no_code_in_the_page(tmp_path):
    results = [Result(name, "a", "A", 1, []) for name in ('=1+1"', "<script>alert(1)</script>")]
    write_csv(results, tmp_path / "grades.csv")
    write_feedback(results[1], tmp_path)
    assert "\n\"'=1+1'\"," in (tmp_path / "grades.csv").read_text()
    assert "<script" not in (tmp_path / "feedback.html").read_text()
