"""Every lab explains itself; the first two threads' labs print what they promise."""

import os
import re
import subprocess
import sys
import time

import nbformat
import pytest
from in_process import run_in_process

from labkit.launch.guard import run_guarded
from labkit.launch.lab import below_their_ranks
from labkit.launch.scripts import ScriptError, project_root, run_script
from labkit.scenarios.toy_captioner import PRINTED

ROOT = project_root()
LAB = "labs/accumulate_vs_ddp.py"


def blocks(output: str) -> dict[str, dict[str, list[str]]]:
    """The lab's output as {heading: {parameter: the three norms}}, in the order of printing."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in output.splitlines():
        if re.fullmatch(r"(equal on )?ranks? [\d, –]+( of \d+)?", line):
            found[line] = current = {}
        elif line.startswith(("encoder.", "decoder.")):
            name, *norms = line.split()
            current[name] = norms
    return found


LABS = sorted(p.name for p in (ROOT / "labs").glob("*.py"))
BENCHMARKS = sorted(p.name for p in (ROOT / "labs" / "benchmarks").glob("*.py"))

LIGHTNING = "labs/accumulate_vs_ddp_lightning.py"
# Started by torchrun, or able to be: all but Lightning's, which starts its ranks itself.
UNDER_TORCHRUN = [name for name in LABS if f"labs/{name}" != LIGHTNING]


@pytest.mark.parametrize("script", LABS)
def test_help_explains_the_script_and_how_to_start_it(script):
    ended = run_in_process(f"labs/{script}", "--help")
    assert ended.code == 0
    assert f"labs/{script}" in ended.stdout
    assert "--seed" in ended.stdout


HELP_OF_ALL = """
import contextlib, runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    assert "torch" not in sys.modules, script
"""


def test_help_does_not_wait_for_the_import_of_torch():
    scripts = [*LABS, *(f"benchmarks/{name}" for name in BENCHMARKS)]
    command = [sys.executable, "-c", HELP_OF_ALL, *(f"labs/{name}" for name in scripts)]
    done = run_guarded(command, 60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == len(scripts)


@pytest.mark.parametrize("script", UNDER_TORCHRUN)
def test_help_and_errors_are_printed_by_the_first_rank_only(script, monkeypatch):
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    for arguments, code in ((("--help",), 0), (("--seed", "no number"), 2)):
        first, second = (run_in_process(f"labs/{script}", *arguments, RANK=r) for r in "01")
        assert (first.code, second.code) == (code, code)
        assert (first.stdout + first.stderr).count("usage:") == 1
        assert second.stdout + second.stderr == ""
    assert "error: argument --seed: invalid int value: 'no number'" in first.stderr
    assert naps == [5], "the second rank lets the first one fail before it"


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("mean_of_means.py", "--accumulate"),
        ("mean_of_means.py", "--captions"),
        ("two_nodes.py", "--repeat"),
        ("when_a_node_fails.py", "--every"),
    ],
)
def test_a_count_of_zero_is_refused_by_the_first_rank_only(script, option, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    first, second = (run_in_process(f"labs/{script}", option, 0, RANK=r) for r in "01")
    assert (first.code, second.code) == (2, 2)
    assert f"error: argument {option}: 0 is less than 1" in first.stderr
    assert second.stdout + second.stderr == ""


def test_help_and_errors_under_torchrun_are_printed_once():
    assert run_script(LAB, "--help", ranks=2).count("usage:") == 1
    with pytest.raises(ScriptError) as caught:
        run_script(LAB, "--seed", "no number", ranks=2, timeout=60)
    assert caught.value.said.count("error: argument --seed: invalid int value: 'no number'") == 1


def test_the_lab_prints_the_threads_table_once_if_it_is_the_same_on_all_four_ranks():
    found = blocks(run_script(LAB, ranks=4))
    threads = {name: [f"{norm:.4f}"] * 3 for name, norm in PRINTED.items()}
    assert found == {"equal on ranks 0–3": threads}


def test_the_lab_prints_the_same_on_forked_ranks_as_on_those_that_torchrun_starts():
    forked, started = (run_script(LAB, ranks=2, fresh=fresh) for fresh in (False, True))
    assert list(blocks(forked)) == ["equal on ranks 0–1"]
    assert started == forked


def test_where_ranks_differ_each_table_is_below_the_ranks_that_have_it():
    assert below_their_ranks(["a", "a", "a"]) == "equal on ranks 0–2\na"
    assert below_their_ranks(["a", "b", "a"]) == "ranks 0, 2 of 3\na\n\nrank 1 of 3\nb"
    assert below_their_ranks(["a"]) == "rank 0 of 1\na"


def test_with_another_seed_every_column_changes_and_all_still_agree():
    output = run_script(LAB, "--seed", "7", ranks=4)
    assert "largest difference between the three, on any rank: < 1e-06" in output
    found = blocks(output)
    assert list(found) == ["equal on ranks 0–3"]
    for norms in found.values():
        for name, printed in PRINTED.items():
            assert len(set(norms[name])) == 1
            assert norms[name][0] != f"{printed:.4f}"


def test_unseeded_data_differ_between_ranks_and_runs_and_the_columns_do_not_agree():
    first, second = (blocks(run_script(LAB, "--unseeded", ranks=2)) for _ in range(2))
    assert list(first) == list(second) == ["rank 0 of 2", "rank 1 of 2"]
    assert first != second, "other data at every run"
    weights = [norms["encoder.weight"] for norms in first.values()]
    assert len({accumulated for accumulated, _, _ in weights}) == 2, "other data on every rank"
    assert len({by_hand for _, by_hand, _ in weights}) == 1
    assert len({ddp for _, _, ddp in weights}) == 1


@pytest.mark.parametrize(
    ("right", "broken"),
    [
        # Every column but one is then as many times too large as there are ranks.
        ("average_gradients(by_hand)\n", 'average_gradients(by_hand, combine="sum")\n'),
        (
            "average_gradients(by_hand)\n",
            "average_gradients(by_hand)\n    by_hand.decoder.bias.grad.fill_(torch.nan)\n",
        ),
        (
            "    ddp(pixels, captions).backward()\n",
            "    ddp(pixels, captions).backward()\n"
            "    if rank == 1:\n        ddp.module.decoder.bias.grad.fill_(torch.nan)\n",
        ),
    ],
)
def test_the_lab_fails_if_the_three_do_not_agree_or_are_no_numbers(
    right, broken, monkeypatch, tmp_path
):
    text = (ROOT / LAB).read_text()
    assert text.count(right) == 1
    (tmp_path / "labs").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / LAB).write_text(text.replace(right, broken))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match="accumulated and distributed gradients do not agree"):
        run_script(LAB, ranks=2)


FIRST_RANK_IS_SLOW = """
import argparse, os, time
from labkit.launch.lab import parse_arguments
time.sleep(2 * (os.environ["RANK"] == "0"))
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parse_arguments(parser)
"""


def test_what_is_wrong_with_the_arguments_is_said_even_if_the_first_rank_is_the_last_to_start(
    monkeypatch, tmp_path
):
    (tmp_path / "labs").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / LAB).write_text(FIRST_RANK_IS_SLOW)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match="invalid int value: 'no number'"):
        run_script(LAB, "--seed", "no number", ranks=2, timeout=60)


def test_lightnings_script_says_that_torchrun_is_not_for_it():
    ended = run_in_process(LIGHTNING, TORCHELASTIC_RUN_ID="of torchrun")
    assert ended.code == 1
    assert "without torchrun" in ended.stderr


def test_without_torchrun_the_lab_says_how_to_start_it():
    ended = run_in_process(LAB)
    assert ended.code == 1
    said = r"start it with torchrun.*\n.*--nproc-per-node 4 labs/accumulate_vs_ddp"
    assert re.search(said, ended.stderr)


def test_a_lab_that_fails_on_one_rank_fails_as_a_whole_in_bounded_time():
    with pytest.raises(ScriptError, match="exit code 1") as caught:
        run_script(LAB, "--seed", "not a number", ranks=2, timeout=60)
    assert caught.value.exit_code == 1


AS_ONE_PROCESS = ["0.374", "0.161", "0.371", "0.250"]  # the gradient of sample 2


def lightning_norms(output: str) -> dict[str, dict[str, list[str]]]:
    """The summary's norms on rank 0 as {version: {"accumulated": [...], "DDP": [...]}}."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in output.split("norm on rank 0")[1].splitlines():
        words = line.split()
        if "accumulated" in words:
            found[words[0]] = {"accumulated": words[2:]}
            version = words[0]
        elif words[:1] == ["DDP"]:
            found[version]["DDP"] = words[1:]
    return found


def what_the_chapter_prints(chapter: str, code: str) -> str:
    """The stored output of the cell with exactly this code, which every test run compares."""
    cells = nbformat.read(ROOT / "book" / chapter, as_version=4).cells
    (cell,) = (c for c in cells if c.cell_type == "code" and c.source == code)
    return "".join(output.text for output in cell.outputs)


def test_only_with_both_fixes_do_the_forum_programs_two_trainers_agree():
    output = what_the_chapter_prints(
        "puzzles/accumulate_vs_ddp.ipynb", f'print(run_script("{LIGHTNING}"))'
    )
    processes = {
        line.split()[0]: line
        for line in output.splitlines()
        if "batch_idx" in line and "GPU" in line
    }
    assert {v: line.split("GPU ")[1] for v, line in processes.items()} == {
        "as-asked": "0: batch_idx: 0",
        "seed-moved": "0: batch_idx: 0",
        "strategy-removed": "0 … 3: batch_idx: 0",
        "both-fixed": "0 … 3: batch_idx: 0",
    }
    norms = lightning_norms(output)
    threads = [f"{norm:.4f}" for norm in PRINTED.values()]
    assert norms["both-fixed"] == {"accumulated": threads, "DDP": threads}
    assert norms["seed-moved"] == {"accumulated": threads, "DDP": AS_ONE_PROCESS}
    for version in ("as-asked", "strategy-removed"):
        assert norms[version]["accumulated"] != norms[version]["DDP"]
        assert norms[version]["accumulated"] != threads


def test_two_devices_that_accumulate_two_batches_agree_too_on_every_rank():
    options = ["--version", "both-fixed", "--devices", "2", "--accumulate", "2"]
    output = run_script(LIGHTNING, *options)
    assert re.findall(r"^GPU .*", output, re.M) == [
        f"GPU {rank}: batch_idx: {index}" for rank in (0, 1) for index in (0, 1)
    ]
    for name, printed in PRINTED.items():
        row = [line for line in output.splitlines() if line.startswith(f"{name} ")][-1]
        assert row.split()[1:] == [f"{printed:.4f}"] * 4


@pytest.mark.parametrize(
    ("right", "broken"),
    [
        ('"both-fixed": (False, True)', '"both-fixed": (True, True)'),
        ('"both-fixed": (False, True)', '"both-fixed": (False, False)'),
    ],
)
def test_the_lightning_lab_fails_if_a_fix_is_missing(right, broken, monkeypatch, tmp_path):
    text = (ROOT / LIGHTNING).read_text()
    assert text.count(right) == 1
    (tmp_path / "labs").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / LIGHTNING).write_text(text.replace(right, broken))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match="does not agree with itself"):
        run_script(LIGHTNING, "--version", "both-fixed", "--devices", "2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lab", "LAB=no_such_lab"], "There is no labs/no_such_lab.py. There are:"),
        (["lab", "LAB=accumulate_vs_ddp_lightning"], "starts its own ranks: .venv/bin"),
        (["repository"], "make repository needs ADDRESS=https://github.com/"),
        (["book", "PYTHON=python3", "-n"], "labkit.book.chapters execute"),
    ],
)
def test_make_explains_itself(arguments, said):
    alien = ("MAKE", "ADDRESS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(alien)}
    command = ["make", "--no-print-directory", *arguments]
    done = run_guarded(command, 60, cwd=ROOT, env=environment)
    assert said in done.stdout + done.stderr


def test_an_old_python_is_refused_by_name(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text(
        "#!/bin/sh\n"
        'exec "$PY" -c "import sys; sys.version_info = (3, 9, 2); '
        'sys.version = \'3.9.2 (old)\'; exec(sys.argv[1])" "$2"\n'
    )
    old.chmod(0o755)
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    done = subprocess.run(
        ["make", "book", f"PYTHON={old}"],
        cwd=tmp_path,
        env={**os.environ, "PY": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "is 3.9.2" in done.stderr
