"""What students receive: the released notebooks, a wheel that runs their checks, instructions.

    average_gradients.ipynb              the release: stubs, visible checks, no solution
    course_checks-1-py3-none-any.whl     this package, and the two files of labkit that it imports
    START_HERE.md                        install, write, check, hand in

The wheel has no solution: neither miniddp, nor the museum, nor a source notebook.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import labkit
from grader.source import Assignment, SourceError

INSTRUCTIONS = "START_HERE.md"
_GRADER = Path(__file__).parent
_LABKIT = Path(labkit.__file__).parent
# All of labkit that a student's grader imports. The rest of labkit.testing holds right averages.
_FROM_LABKIT = ("__init__.py", "lazy.py", "launch", "testing/__init__.py", "testing/watch.py")
_DISTRIBUTION, _VERSION = "course-checks", "1"
_TIMEOUT = 300  # seconds for pip to build a wheel of Python files


def write_student_package(
    out: Path, notebooks: Sequence[Path], assignments: Iterable[Assignment]
) -> None:
    """Write `out`, a zip file if it is called so and else a folder, from released `notebooks`.

    A folder may exist; files of the same names are replaced. Raises SourceError
    when the wheel cannot be built; OSError. Costs about 5 s.
    """
    assignments = list(assignments)
    with tempfile.TemporaryDirectory(prefix="grader-package-") as name:
        folder = Path(name) / "package"
        folder.mkdir()
        wheel = build_wheel(Path(name) / "build", folder)
        for notebook in notebooks:
            shutil.copyfile(notebook, folder / notebook.name)
        page = instructions(wheel.name, notebooks, assignments)
        (folder / INSTRUCTIONS).write_text(page, encoding="utf-8")
        if out.suffix == ".zip":
            _write_zip(folder, out)
        else:
            shutil.copytree(folder, out, dirs_exist_ok=True)


def _write_zip(folder: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, f"{out.stem}/{path.name}")
    unfinished.replace(out)


def build_wheel(work: Path, out: Path) -> Path:
    """Build the students' wheel from a copy in `work` into `out`, offline; returns its path.

    It asks for the torch of this environment: another version may differ in what a check compares.
    """
    sources = work / "src"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_GRADER, sources / "grader", ignore=ignored)
    for name in _FROM_LABKIT:
        target = sources / "labkit" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (_LABKIT / name).is_dir():
            shutil.copytree(_LABKIT / name, target, ignore=ignored)
        else:
            shutil.copyfile(_LABKIT / name, target)
    (work / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n\n'
        f'[project]\nname = "{_DISTRIBUTION}"\nversion = "{_VERSION}"\n'
        'description = "Runs the visible checks of a course\'s assignments"\n'
        'requires-python = ">=3.11"\n'
        f'dependencies = ["torch=={_torch_version()}", "numpy", "psutil", "cloudpickle", "jinja2", '
        '"tqdm"]\n\n'
        '[tool.setuptools.packages.find]\nwhere = ["src"]\nnamespaces = false\n\n'
        '[tool.setuptools.package-data]\ngrader = ["*.j2"]\n'
    )
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--wheel-dir"]
    done = subprocess.run(
        [*command, str(out), str(work)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT,
    )
    if done.returncode:
        raise SourceError(
            "the students' wheel could not be built; it needs pip and setuptools in this "
            f"environment. pip says: {done.stderr.strip()[-500:]}"
        )
    (wheel,) = out.glob("*.whl")
    return wheel


def instructions(wheel: str, notebooks: Sequence[Path], assignments: Sequence[Assignment]) -> str:
    """The page that a student reads first."""
    files = "\n".join(
        f"- `{notebook.name}`: {assignment.title}, {assignment.points:g} points"
        for notebook, assignment in zip(notebooks, assignments, strict=True)
    )
    return _PAGE.format(wheel=wheel, files=files, first=notebooks[0].name, torch=_torch_version())


def _torch_version() -> str:
    """The release of the torch of this environment, without the name of its build."""
    return version("torch").partition("+")[0]


_PAGE = """\
# Start here

This folder holds your assignments and the program that checks them:

{files}
- `{wheel}`: the checks that you can run yourself

You need Linux and Python 3.11 or newer. On Windows, use WSL. macOS should work, but nobody has
tried it.

## 1. Install, once

Open a terminal in this folder:

```bash
python3 -m venv .venv
.venv/bin/pip install torch=={torch} --index-url https://download.pytorch.org/whl/cpu
.venv/bin/pip install ./{wheel} jupyterlab
```

The second line installs PyTorch for the CPU, about 200 MB. Without it, the third line installs
PyTorch with CUDA, several GB.

## 2. Write

```bash
.venv/bin/jupyter lab {first}
```

Write your code in the cells that say `Your code here`, or fix the code in them. Keep every cell
where it is. Your functions may use the notebook's imports. Imports and helpers of your own go into
the same cell as the function.

## 3. Check

Run the cell below a task: it checks the functions that you have run in this notebook. Or save the
notebook, and check all of it:

```bash
.venv/bin/python -m grader validate {first}
```

These checks count for some of the points. The others run on fresh inputs after you hand in.

## 4. Hand in

Hand in the notebook under the name that it has. Only the code in your solution cells is graded:
outputs, prints, and other cells are not read.
"""
