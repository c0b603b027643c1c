"""Who imports whom, what ranks load, and how much Python there may be."""

import ast
import contextlib
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from labkit.launch.scripts import project_root

ROOT = project_root()
SRC = ROOT / "src"
LONGEST_FUNCTION = 40  # lines, without the signature and the docstring
# Training scripts as people write them, which the doctor is tried on: data.
STORED = ("surveys/doctor/corpus/", "surveys/doctor/draws/", "tests/doctor/scripts/")


class Budget(NamedTuple):
    """The most that a place may have. To raise it is a change of BUDGETS, with its reason."""

    place: str
    """how the paths begin"""
    lines: int
    """of Python, with docstrings and comments"""
    files: int
    """of Python"""


BUDGETS = (
    Budget("src/miniddp/", 6900, 52),
    Budget("src/labkit/", 11250, 72),
    Budget("src/ddp_doctor/", 13900, 84),
    Budget("src/grader/", 4050, 24),
    Budget("labs/", 3700, 24),
    Budget("book/", 4700, 41),
    Budget("surveys/", 5700, 55),
    Budget("tests/", 24300, 163),
    Budget("", 74750, 518),
)
MOST_FILES = {"": 603, ".py": 463}  # by the end of their names; outside of surveys


def test_every_package_imports_only_what_it_may(monkeypatch, capsys):
    """The contracts, and the reading order of miniddp, are in pyproject.toml."""
    monkeypatch.chdir(project_root())
    # It would disable the loggers of all that this process has imported, such as Sphinx's.
    monkeypatch.setattr("logging.config.dictConfig", lambda _: None)
    kept = lint_imports(no_cache=True) == EXIT_STATUS_SUCCESS
    assert kept, capsys.readouterr().out


def files_of_the_project() -> list[str]:
    """What git tracks, or where git does not say, what it would not ignore; as paths from ROOT."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            return [name for name in told.stdout.split("\0") if (ROOT / name).is_file()]
    return walked()


def walked() -> list[str]:
    """The files that .gitignore does not name; a slash in front of a name means: in ROOT only."""
    ignored = [".git", *(ROOT / ".gitignore").read_text().split()]
    found = []
    for folder, folders, files in os.walk(ROOT):
        here = Path(folder).relative_to(ROOT)
        names = [name.strip("/") for name in ignored if here == Path() or name[0] != "/"]
        kept = [n for n in folders + files if not any(fnmatch(n, name) for name in names)]
        folders[:] = [name for name in folders if name in kept]
        found += [(here / name).as_posix() for name in files if name in kept]
    return found


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """The lines of each file of Python."""
    names = [n for n in files_of_the_project() if n.endswith(".py") and not n.startswith(STORED)]
    return {name: len((ROOT / name).read_text().splitlines()) for name in names}


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.place or "all")
def test_no_place_has_more_python_than_its_budget(budget, sizes):
    lines = [size for name, size in sizes.items() if name.startswith(budget.place)]
    assert lines, f"{budget.place} has no Python: take it out of BUDGETS"
    for kind, number, most in [
        ("lines", sum(lines), budget.lines),
        ("files", len(lines), budget.files),
    ]:
        assert number <= most, (
            f"{budget.place or 'The project'} has {number} {kind} of Python, and {most} are its "
            "limit: remove or join something there, or raise the limit in BUDGETS and say why"
        )


@pytest.mark.parametrize("end", MOST_FILES)
def test_there_are_not_too_many_files(end):
    names = [n for n in files_of_the_project() if not n.startswith(("surveys/", *STORED))]
    number = sum(name.endswith(end) for name in names)
    assert number <= MOST_FILES[end], (
        f"There are {number} files *{end} outside of surveys, and {MOST_FILES[end]} are the limit: "
        "join what is one idea, or raise MOST_FILES and say why"
    )


def functions_of(path: Path) -> list[tuple[str, int]]:
    """The name of each function in a file, and the lines of its body without the docstring."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            found.append((node.name, lines))
    return found


def test_a_function_of_miniddp_has_at_most_40_lines():
    files = sorted((SRC / "miniddp").rglob("*.py"))
    found = {path.name: functions_of(path) for path in files}
    assert any(found.values())
    too_long = [
        f"{file}: {name} has {lines}"
        for file, functions in found.items()
        for name, lines in functions
        if lines > LONGEST_FUNCTION
    ]
    assert too_long == []


# Of what `run_ranks` runs, no module loads these: they would take every call half a second or more.
SLOW = ("matplotlib", "matplotlib_inline", "IPython")
FOR_RANKS = ("testing", "scenarios", "profiling")
# It draws; no rank imports it.
NOT_FOR_RANKS = ("labkit.profiling.timeline",)


def modules_for_ranks() -> list[str]:
    files = [f for name in FOR_RANKS for f in sorted((SRC / "labkit" / name).rglob("*.py"))]
    names = [".".join(file.relative_to(SRC).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names if name not in NOT_FOR_RANKS]


def test_what_ranks_import_does_not_load_matplotlib():
    """All in one process: if it fails, `python -X importtime` names the module."""
    program = (
        "import importlib, sys\n"
        f"for name in {modules_for_ranks()}: importlib.import_module(name)\n"
        f"print([name for name in {SLOW} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
