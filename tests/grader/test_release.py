"""Every assignment is released once here: its lint, its students' package, what a student runs."""

import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from types import SimpleNamespace

import pytest
from grader_notebooks import (
    ASSIGNMENTS,
    FIRST,
    cell,
    first_assignment,
    small_assignment,
    write,
)

from grader.__main__ import main
from grader.source import read_assignment
from grader.student import check

SOURCES = {path.stem: path for path in sorted(ASSIGNMENTS.glob("*.ipynb"))}
# To try the solutions of an assignment takes 20 s: `make test` does so with a small one.
EACH = ["small", *(pytest.param(stem, marks=pytest.mark.slow) for stem in SOURCES)]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Releases an assignment once; gives it, the folder, and what was printed."""

    @functools.cache
    def once(stem):
        folder, printed = tmp_path_factory.mktemp(stem), io.StringIO()
        source = SOURCES.get(stem) or small_assignment(tmp_path_factory.mktemp("source"))
        package = ["--trust", "--package", str(folder / f"{stem}.zip")]
        with contextlib.redirect_stdout(printed):
            assert main(["release", str(source), str(folder), *package]) == 0
        return read_assignment(source), folder, printed.getvalue()

    return once


@pytest.mark.parametrize("stem", EACH)
def test_an_assignment_can_be_released(stem, released):
    """Its key earns everything, its stubs nothing, each wrong answer loses its own checks only."""
    assignment, folder, printed = released(stem)
    count = 2 + len(assignment.wrong_answers)
    assert [f"[{n}/{count}] ok " in printed for n in range(1, count + 1)] == [True] * count
    assert f"Released: {folder}" in printed


def texts(folder, stem):
    """Every file of a package by name, as text."""
    with zipfile.ZipFile(folder / f"{stem}.zip") as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        return {name.removeprefix(f"{stem}/"): archive.read(name).decode() for name in names}


@pytest.mark.parametrize("stem", EACH)
def test_a_package_holds_no_line_of_a_solution_no_hidden_check_and_no_wrong_answer(stem, released):
    assignment, folder, _ = released(stem)
    files = texts(folder, stem)
    assert "\n".join(files).count(".ipynb") == 1
    assert not [name for name in files if "museum" in name or "miniddp" in name]
    shown = {line.strip() for text in assignment.givens for line in text.splitlines()}
    shown |= {line.strip() for stub in assignment.stubs().values() for line in stub.splitlines()}
    keys = {line.strip() for key in assignment.keys().values() for line in key.splitlines()}
    forbidden = {line for line in keys - shown if len(line) > 25}
    assert forbidden
    forbidden |= {check.concept for check in assignment.checks if not check.visible}
    forbidden |= {wrong.source for wrong in assignment.wrong_answers}
    for line in forbidden:
        for written in (line, json.dumps(line, ensure_ascii=False)[1:-1]):
            assert not [name for name, text in files.items() if written in text], line


@pytest.mark.slow
def test_a_student_unpacks_the_package_and_runs_the_visible_checks(released, tmp_path):
    """In an environment that has torch, and nothing else of this project."""
    stem = FIRST.stem
    _, folder, _ = released(stem)
    with zipfile.ZipFile(folder / f"{stem}.zip") as archive:
        archive.extractall(tmp_path)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    # A path in a .pth file is searched, but the .pth files of an editable install there are not.
    (site / "torch_and_others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*words):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [python, "-m", *words, "average_gradients.ipynb"]
        return subprocess.run(
            command, cwd=tmp_path / stem, env=environment, capture_output=True, text=True
        )

    assert "No module named miniddp" in run("miniddp").stderr
    done = run("grader", "validate")
    assert (done.returncode, done.stderr) == (1, "")
    assert "each_average: not yet. It is not written yet (each)." in done.stdout
    assert "Visible checks: 0 of 2 (0 points); 7 more points use fresh inputs" in done.stdout
    page = (tmp_path / stem / "START_HERE.md").read_text()
    assert "`average_gradients.ipynb`: Average the gradients, 10 points" in page
    notebook = json.loads((tmp_path / stem / "average_gradients.ipynb").read_text())
    for name, key in first_assignment().keys().items():
        cell(notebook, name)["source"] = key
    write(notebook, tmp_path / stem / "average_gradients.ipynb")
    done = run("grader", "validate")
    assert done.stdout.startswith("each_average: passed\nflat_average: passed\n"), done.stderr


def test_a_check_in_a_notebook_runs_what_its_kernel_has_executed(
    released, tmp_path, monkeypatch, capsys
):
    """Whatever is saved, and whichever copies lie beside it."""
    assignment, folder, _ = released("small")
    for name in ("average_gradients.ipynb", "copy.ipynb"):
        shutil.copy(folder / "average_gradients.ipynb", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    executed = []
    shell = SimpleNamespace(user_ns={"In": executed})
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    check("average_gradients", "each_average")
    said = capsys.readouterr().out
    assert said == "Run the cell each first: this kernel has not executed it yet.\n"
    executed += [assignment.keys()["each"], assignment.wrong_answers[0].source, "1 + 1"]
    check("average_gradients", "each_average")
    said = capsys.readouterr().out
    assert said.startswith("each_average: not yet. The average over the ranks is the sum divided")
    assert "has the right direction, but is 2 times the right one." in said
