"""What students receive: it runs their checks, and holds no solution and no hidden check."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from grader_notebooks import ASSIGNMENTS, FIRST, cell, first_assignment, write

from grader.release import release, write_release
from grader.source import read_assignment
from grader.student_package import build_wheel, write_student_package

SOURCES = sorted(ASSIGNMENTS.glob("*.ipynb"))


@pytest.fixture(scope="module", autouse=True)
def packages_share_a_wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The first package builds it. No wheel depends on an assignment, and pip takes seconds."""
    folder = tmp_path_factory.mktemp("wheel")
    built: list[Path] = []

    def build_once(work: Path, out: Path) -> Path:
        if not built:
            built.append(build_wheel(work, folder))
        return Path(shutil.copy(built[0], out))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grader.student_package.build_wheel", build_once)
        yield


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """{source: the zip file that its students get}; the first one's checks can be run."""
    folder = tmp_path_factory.mktemp("packages")
    made = {}
    for source in SOURCES:
        assignment = read_assignment(source)
        notebook = folder / "released" / f"{assignment.name}.ipynb"
        if source == FIRST:
            write_release(assignment, notebook, trust=True)
        else:
            write(release(assignment, []), notebook)
        made[source] = folder / f"{assignment.name}.zip"
        write_student_package(made[source], [notebook], [assignment])
    return made


def texts(package: Path, scratch: Path) -> dict[str, str]:
    """Every file of a package by name, those of its wheel among them, as text."""
    with zipfile.ZipFile(package) as archive:
        archive.extractall(scratch)
    found = {}
    for path in (scratch / package.stem).iterdir():
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                found |= {name: wheel.read(name).decode() for name in wheel.namelist()}
        else:
            found[path.name] = path.read_text()
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_package_holds_no_line_of_a_solution_no_hidden_check_and_no_wrong_answer(
    source, packages, tmp_path
):
    assignment = read_assignment(source)
    files = texts(packages[source], tmp_path)
    assert f"{assignment.name}.ipynb" in files
    shown = {line.strip() for text in assignment.givens for line in text.splitlines()}
    shown |= {line.strip() for stub in assignment.stubs().values() for line in stub.splitlines()}
    keys = {line.strip() for key in assignment.keys().values() for line in key.splitlines()}
    forbidden = {line for line in keys - shown if len(line) > 25}
    assert forbidden
    for check in assignment.checks:
        if not check.visible:
            forbidden.add(check.concept)
    forbidden |= {wrong.source for wrong in assignment.wrong_answers}
    for name, text in files.items():
        for line in forbidden:
            for written in (line, json.dumps(line, ensure_ascii=False)[1:-1]):
                assert written not in text, (name, line)


def test_the_search_of_that_test_finds_a_solution_where_there_is_one(packages, tmp_path):
    """The keys themselves, as a package: what is searched for is really in them."""
    assignment = read_assignment(FIRST)
    keyed = tmp_path / "keyed.ipynb"
    write({"cells": [{"source": key} for key in assignment.keys().values()]}, keyed)
    write_student_package(tmp_path / "leak.zip", [keyed], [assignment])
    text = texts(tmp_path / "leak.zip", tmp_path)["keyed.ipynb"]
    assert json.dumps("parameter.grad = torch.zeros_like(parameter)")[1:-1] in text


def test_the_wheel_has_the_grader_and_nothing_that_averages_gradients(packages, tmp_path):
    names = texts(packages[FIRST], tmp_path)
    assert "grader/inside/rank.py" in names
    assert "grader/feedback.html.j2" in names
    ours = {name.partition("/")[0] for name in names if "/" in name and ".dist-info" not in name}
    assert ours == {"grader", "labkit"}
    assert not [name for name in names if "museum" in name or "miniddp" in name]
    assert [name for name in names if name.endswith(".ipynb")] == ["average_gradients.ipynb"]


def test_the_instructions_name_the_files_that_are_there(packages, tmp_path):
    page = texts(packages[FIRST], tmp_path)["START_HERE.md"]
    (wheel,) = (tmp_path / "average_gradients").glob("*.whl")
    assert f"./{wheel.name} " in page
    assert "`average_gradients.ipynb`: Average the gradients, 10 points" in page
    assert "grader validate average_gradients.ipynb" in page


def test_a_student_installs_the_wheel_and_runs_the_visible_checks(packages, tmp_path):
    """In an environment that has torch, and nothing else of this project."""
    texts(packages[FIRST], tmp_path)
    folder = tmp_path / "average_gradients"
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    # A path in a .pth file is searched, but the .pth files of an editable install there are not.
    (site / "torch_and_others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--no-cache-dir", wheel], check=True, timeout=120)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [python, *words]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )

    for name in ("miniddp", "labkit.testing.compare"):
        assert "ModuleNotFoundError" in run("-c", f"import {name}").stderr
    done = run("-m", "grader", "validate", "average_gradients.ipynb")
    assert (done.returncode, done.stderr) == (1, "")
    assert "each_average: not yet. It is not written yet (each)" in done.stdout
    notebook = json.loads((folder / "average_gradients.ipynb").read_text())
    for name, key in first_assignment().keys().items():
        cell(notebook, name)["source"] = key
    write(notebook, folder / "average_gradients.ipynb")
    done = run("-m", "grader", "validate", "average_gradients.ipynb")
    assert done.stdout.startswith("each_average: passed\nflat_average: passed\n"), done.stderr


def test_a_package_can_be_a_folder_and_is_replaced_file_by_file(packages, tmp_path):
    assignment = first_assignment()
    notebook = write({"cells": []}, tmp_path / "average_gradients.ipynb")
    for _ in range(2):
        write_student_package(tmp_path / "package", [notebook], [assignment])
    names = sorted(path.name for path in (tmp_path / "package").iterdir())
    assert names[0] == "START_HERE.md"
    assert names[1] == "average_gradients.ipynb"
    assert names[2].endswith(".whl")
    assert len(names) == 3
