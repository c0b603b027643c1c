"""`make lab` ends with what the lab said: torchrun adds no traceback."""

import sys
from pathlib import Path

import pytest

from labkit.launch.guard import run_guarded
from labkit.launch.make_lab import main


@pytest.mark.parametrize("ranks", ["0", "-1", "abc", "1.5", "", "²"])
def test_a_number_of_ranks_that_is_none_is_refused_in_one_sentence(ranks, capsys):
    assert main(ranks, "labs/accumulate_vs_ddp.py") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert f"RANKS is {ranks!r}" in said.err


LAB = """
import os, sys
if os.environ["WORLD_SIZE"] != "1":
    if os.environ["RANK"] == "0":
        print("this lab has one rank, and not", os.environ["WORLD_SIZE"], *sys.argv[1:])
    sys.exit(3)
print("done with", *sys.argv[1:], os.environ["OMP_NUM_THREADS"])
"""


def test_a_lab_that_fails_is_the_only_one_to_speak_and_its_exit_code_is_handed_on(tmp_path: Path):
    (tmp_path / "lab.py").write_text(LAB)
    command = [sys.executable, "-m", "labkit.launch.make_lab"]
    failed = run_guarded([*command, "2", tmp_path / "lab.py", "--seed", "7"], 120)
    assert failed.returncode == 3
    assert failed.stdout == "this lab has one rank, and not 2 --seed 7\n"
    assert failed.stderr == ""
    done = run_guarded([*command, "1", tmp_path / "lab.py", "--seed", "7"], 120)
    assert (done.returncode, done.stdout) == (0, "done with --seed 7 1\n")
