"""Who imports whom, what ranks load, and how long a function of miniddp may be."""

import ast
import subprocess
import sys
from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from labkit.launch.scripts import project_root

SRC = project_root() / "src"
LONGEST_FUNCTION = 40  # lines, without the signature and the docstring


def test_every_package_imports_only_what_it_may(monkeypatch, capsys):
    """The contracts, and the reading order of miniddp, are in pyproject.toml."""
    monkeypatch.chdir(project_root())
    # It would disable the loggers of all that this process has imported, such as Sphinx's.
    monkeypatch.setattr("logging.config.dictConfig", lambda _: None)
    kept = lint_imports(no_cache=True) == EXIT_STATUS_SUCCESS
    assert kept, capsys.readouterr().out


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
