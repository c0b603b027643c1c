"""The programs of labs/programs are right, and the check sees every bug that it can plant."""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from labkit.book import check as checks
from labkit.book.check import (
    NAMES,
    Bug,
    NotYetError,
    bugs_of,
    check,
    faults,
    main,
    with_bug,
)
from labkit.launch import project_root, run_ranks

ROOT = project_root()
PROGRAMS = ROOT / "labs/programs"
SEEDS = (5, 4321)


def rows_of_versions(
    rank: int, world_size: int, program: str, versions: list[str], folder: Path
) -> list[list[Any]]:
    """For each version and seed, the tables that this rank's function returns the row of."""
    found = []
    for number, text in enumerate(versions):
        for seed in SEEDS:
            names = {"__name__": "program"}
            exec(compile(text, f"{program} {number}", "exec"), names)
            function = names["evaluate" if program == "evaluate" else "train"]
            batches = 48 // 4 // world_size
            runs: list[Any] = [seed]
            if program == "resume":
                run = argparse.Namespace
                stops = batches + 1, batches
                checkpoints = {at: folder / f"{number}-{seed}-{at}.pt" for at in stops}
                runs = [
                    run(seed=seed, checkpoint=path, stop=at)
                    for path, at in (
                        (None, None),
                        *((checkpoints[stop], at) for stop in checkpoints for at in (stop, None)),
                    )
                ]
            rows: list[Any] = []
            for argument in runs:
                dist.barrier()  # rank 0 has written the checkpoint
                try:
                    rows.append(function(argument, rank, world_size))
                except (RuntimeError, UnboundLocalError) as error:
                    rows.append(str(error))
            found.append([row for row in rows if row])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("program", NAMES)
def test_the_check_accepts_a_program_and_sees_each_of_its_bugs(program, world_size, tmp_path):
    text = (PROGRAMS / f"{program}.py").read_text()
    bugs = [Bug("", "", "none"), *bugs_of(program)]
    versions = [text, *(with_bug(text, bug) for bug in bugs[1:])]
    of_ranks = run_ranks(rows_of_versions, world_size, program, versions, tmp_path, timeout=300)
    missed = []
    for number, runs in enumerate(zip(*of_ranks, strict=True)):
        bug, seed = bugs[number // len(SEEDS)], SEEDS[number % len(SEEDS)]
        tables = [list(rows) for rows in zip(*runs, strict=True)]
        raised = any(isinstance(row, str) for table in tables for row in table)
        said = "raises" if raised else faults(program, seed, tables)
        print(f"{program}, {world_size} ranks, seed {seed}: {bug.says}\n{said}")
        if bool(said) != bool(bug.right):
            missed.append(f"{bug.says} → {said or 'accepted'}")
    assert not missed, "\n".join(missed)


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout that is the current folder and has the programs only."""
    shutil.copytree(PROGRAMS, tmp_path / "labs/programs")
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(monkeypatch, *arguments: object) -> object:
    """The exit code of the command: a text if it ends with one."""
    monkeypatch.setattr(sys, "argv", ["check", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_program_is_run_as_torchrun_does_and_found_right(checkout, capsys):
    check(checkout / "labs/programs/log_mean.py", [2])
    assert capsys.readouterr().out.startswith("Right on 2 ranks, with --seed ")


def test_a_resume_with_a_bug_is_compared_with_the_run_that_does_not_stop(checkout, monkeypatch):
    main_with(monkeypatch, "--plant", 8, "labs/programs/resume.py")
    said = call(monkeypatch, "--ranks", 3, "notebooks/resume_8.py")
    assert "On 3 ranks, with --seed " in said
    assert "every rank, moved: " in said
    assert "if stopped in an epoch and resumed" in said
    assert "Look at what the checkpoint has of the model, the optimizer" in said


RANKS_BUT_0_DROP = "< sampler.total_size - world_size * (rank > 0)"
LAST_RANK_DROPS = "< sampler.total_size - world_size * (rank + 1 == world_size)"


@pytest.mark.parametrize(
    ("program", "right", "wrong", "ranks"),
    [
        ("log_mean", "loss_sum * world_size", "loss_sum * min(world_size, 3)", 4),
        ("evaluate", "< len(data)", RANKS_BUT_0_DROP, 3),
        ("evaluate", "< len(data)", LAST_RANK_DROPS, 4),
    ],
)
def test_a_program_that_is_right_on_fewer_ranks_only_is_seen(
    program, right, wrong, ranks, checkout, monkeypatch
):
    file = checkout / f"labs/programs/{program}.py"
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    assert call(monkeypatch, file).startswith(f"Not yet. On {ranks} ranks, with --seed ")


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("args.checkpoint.exists()", "0", r"With the checkpoint of step \d+, it takes 18 steps"),
        ("step == args.stop:", "step == 18 and args.stop:", r"With --stop \d+, it takes 18 steps"),
        (", digest]", ", f'{rank}']", "rank 1 only, weights: 1; rank 0 has 0"),
    ],
    ids=["resumes from nothing", "does not stop", "replicas differ"],
)
def test_a_resume_that_only_prints_the_right_numbers_is_seen(right, wrong, said, checkout):
    file = checkout / "labs/programs/resume.py"
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    with pytest.raises(NotYetError, match=said):
        check(file, [2])


def main_with(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["check", *map(str, arguments)])
    main()


RANKS = "import os, sys, time, torch.distributed as dist\ndist.init_process_group('gloo')\n"
RANKS += "rank = dist.get_rank()\n"
TABLE = "print('rank step_4 step_8 step_12 moved\\n0 1 1 1 nan\\n1 1 1 1 2') if rank == 0 else 0\n"
WRITTEN = {
    "raises": (
        "if rank == 1: raise ValueError('no data')\ndist.barrier()",
        r"Raised on rank 1 of 2:\nTraceback [^\n]*\n  File \"[^\n]*log_mean_1.py\", line 4, in "
        r"<module>\n[^F]*ValueError: no data\n.*rank 0: waits in barrier, at .* line 5: dist.barr",
    ),
    "hangs": (
        "if rank == 1: dist.barrier()",
        r"1 of 2 ranks waits for.*rank 1: waits in barrier, at .*log_mean_1.py line 4.*same order",
    ),
    "sleeps": (
        "time.sleep(600)",
        "It hangs: 2 of 2 .* 3 s.*rank 0: still runs, at .* line 4",
    ),
    "no table": ("print('done')", "It prints no line with the names of the columns: rank  step_4"),
    "ends early": (f"sys.exit(0)\n{TABLE}", "It prints no line with the names of the columns"),
    "leaves": (
        "os._exit(0) if rank else 0",
        "rank 1 of 2 ended without a result, with exit code",
    ),
    "takes no seed": ("sys.exit('usage: log_mean.py')", r"called sys.exit\('usage: log_mean.py'\)"),
    "a row": (TABLE.replace("1 1 1 1 2", ""), "it needs 2 lines, one for each"),
    "NaN": (TABLE, r"rank 0, moved: nan; one process computes \d\.\d+\n *rank 1, moved: 2;"),
    "forks": (f"dist.barrier()\nos.fork()\n{TABLE}", "every rank, step_4: 1; one process computes"),
    "megabytes": (
        f"print('x' * 2**20)\n{TABLE}",
        "It prints too much: .* more bytes than are",
    ),
    "a full disk": ("while True: print('x' * 2**20)", "OSError: .*File too large"),
    "asks labkit": ("from labkit.book import expected", "It imports labkit, which knows what is"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_that_is_no_right_program_is_told_why(name, checkout, monkeypatch):
    text, said = WRITTEN[name]
    if name == "sleeps":
        monkeypatch.setattr(checks, "TIMEOUT", 3)
    monkeypatch.setattr(checks, "_STUCK_AFTER", 0.5)
    file = checkout / "log_mean_1.py"
    file.write_text(RANKS + text)
    with pytest.raises(NotYetError, match=f"(?s){said}"):
        check(file, [2])


def test_two_numbers_in_a_row_plant_different_bugs_and_reveal_tells_them(
    checkout, monkeypatch, capsys
):
    copies = []
    for number in (7, 8):
        main_with(monkeypatch, "--plant", number, "labs/programs/mixed.py")
        copies.append((checkout / f"notebooks/mixed_{number}.py").read_text())
        main_with(monkeypatch, "--reveal", f"notebooks/mixed_{number}.py")
        bug = bugs_of("mixed")[number % len(bugs_of("mixed"))]
        assert bug.says in capsys.readouterr().out
        assert copies[-1] == with_bug((PROGRAMS / "mixed.py").read_text(), bug)
    assert copies[0] != copies[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["labs/programs/none.py"], "labs/programs/none.py is not a file"),
        (["pyproject.toml"], "is not a version of a program"),
        (["--reveal", "labs/programs/resume.py"], "resume.py has no number"),
        (["--plant", "7", "notebooks/resume_7.py"], "plant bugs in the one of labs/programs"),
        (["--plant", "7", "labs/programs/resume.py"], "is there already: remove it"),
        (["--plant", "x", "labs/programs/resume.py"], "'x' is no positive whole number"),
        (["--plant", "-1", "labs/programs/resume.py"], "'-1' is no positive whole number"),
        (["--plant", "٣", "labs/programs/resume.py"], "'٣' is no positive whole number"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(arguments, said, checkout, monkeypatch, capsys):
    main_with(monkeypatch, "--plant", 7, "labs/programs/resume.py")
    assert call(monkeypatch, *arguments) == 2
    assert said in capsys.readouterr().err
