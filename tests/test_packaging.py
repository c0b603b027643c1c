"""What `pip install .` gives a stranger: miniddp, on torch alone."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from labkit.launch.scripts import project_root

ROOT = project_root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: {Requirement(package).name for package in packages}
    for extra, packages in PROJECT["optional-dependencies"].items()
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources: the build would leave its folders in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = ["pyproject.toml", "README.md", "LICENSE", *map(str, sorted(ROOT.glob("src/**/*")))]
    for name in tracked:
        source = ROOT / name
        if source.is_file() and source.suffix != ".pyc":
            target = folder / "copy" / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--wheel-dir", folder, folder / "copy"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_strangers_get_two_packages_that_need_torch_alone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"miniddp", "ddp_doctor"}
    assert "miniddp/py.typed" in names
    assert not any(name.endswith("entry_points.txt") for name in names)
    (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [one for one in required if "extra ==" not in one] == ["torch>=2.11"]


def required_by(name: str) -> list[metadata.Distribution]:
    """This distribution and all that it requires here, without extras."""
    found, names = [], [name]
    for name in names:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # required on other systems only
            continue
        found.append(distribution)
        wanted = [one for one in distribution.requires or () if "extra ==" not in one]
        names += {re.match(r"[\w.-]+", one)[0] for one in wanted} - set(names)
    return found


# Imports every module of miniddp, and the doctor's command, where nothing else is installed.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil
import ddp_doctor.__main__, miniddp
for module in pkgutil.walk_packages(miniddp.__path__, "miniddp."):
    importlib.import_module(module.name)
print([name for name in ("labkit", "grader", "numpy") if importlib.util.find_spec(name)])
"""


def test_every_module_of_the_wheel_can_be_imported_beside_torch_alone(
    wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)  # what pip does with a wheel of Python files
    # torch and what it requires, from the environment of this test, without a download.
    for distribution in required_by("torch"):
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    command = [tmp_path / "venv" / "bin" / "python", "-c", IMPORT_ALL]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "[]\n", done.stderr


# The distribution that brings a module; the trainers of surveys/trainers need not be here.
DISTRIBUTIONS = metadata.packages_distributions() | {
    "composer": ["mosaicml"],
    "ignite": ["pytorch-ignite"],
    "open_clip": ["open-clip-torch"],
    "pytorch_metric_learning": ["pytorch-metric-learning"],
    "sentence_transformers": ["sentence-transformers"],
    "swift": ["ms-swift"],
}
# Each row of surveys/trainers names its package; some need an environment of their own.
TRAINERS = ROOT / "surveys" / "trainers" / "trainers.py"
EXTRAS_OF = {
    "src/miniddp": (),
    "src/ddp_doctor": ("doctor",),
    "src/labkit": ("book",),
    "src/grader": ("grader",),
    "labs": ("book", "grader"),
    "surveys": ("book", "grader", "conformance", "test"),
    "tests": ("book", "grader", "test", "doctor"),
    "tools": (),
    "book": ("book", "test"),
}


def imported_by(folder: str) -> set[str]:
    """The top-level modules that the Python files below `folder` import.

    Without the shims of other people's programs, which bring their own packages.
    """
    found = set()
    for path in (path for path in (ROOT / folder).rglob("*.py") if "shims" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("folder", EXTRAS_OF)
def test_every_package_that_the_code_imports_is_declared(folder: str) -> None:
    own = {path.name for path in ROOT.glob("src/*")} | {path.stem for path in ROOT.glob("tests/*")}
    beside = ("book/*/*.py", "labs/*.py", "labs/*/*.py", "surveys/*/*.py", "tools/*.py")
    own |= {
        "doctor",
        "surveys",
        "tests",
        "tools",
        *(path.stem for pattern in beside for path in ROOT.glob(pattern)),
    }
    foreign = imported_by(folder) - own - set(sys.stdlib_module_names) - {"torch"}
    declared = {canonicalize_name(p) for extra in EXTRAS_OF[folder] for p in EXTRAS[extra]}
    if folder == "surveys":
        declared |= set(map(canonicalize_name, re.findall(r'"([\w-]+)"', TRAINERS.read_text())))
    brings = {
        name: set(map(canonicalize_name, DISTRIBUTIONS.get(name, [name]))) for name in foreign
    }
    undeclared = [name for name, brought in brings.items() if not brought & declared]
    assert undeclared == [], f"{folder} imports what pyproject.toml does not declare"


def test_every_extra_is_installed_by_make_at_a_pinned_version() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    constrained = (ROOT / "constraints.txt").read_text().lower()
    own_pins = PROJECT["optional-dependencies"]["conformance"]
    assert [package for package in own_pins if "==" not in package] == []
    installed = [packages for extra, packages in EXTRAS.items() if extra != "conformance"]
    for package in {package for packages in installed for package in packages}:
        known = package.lower() in pinned or f"{package.lower()}==" in constrained
        assert known, f"{package} has no version in requirements.txt or constraints.txt"
