"""What strangers install: two packages, and what each of them requires."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from importlib.util import find_spec
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
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution of each of the two packages."""
    folder = tmp_path_factory.mktemp("built")
    for package in ("miniddp", "ddp_doctor"):
        command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
        done = subprocess.run(
            command, cwd=ROOT / "src" / package, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("package", "required", "command"),
    [
        ("miniddp", ["torch>=2.11"], None),
        ("ddp_doctor", ["torch>=2.11"], "ddp-doctor = ddp_doctor.__main__:main"),
    ],
)
def test_a_wheel_holds_one_package_typed_and_says_what_it_is(
    built: Path, package: str, required: list[str], command: str | None
) -> None:
    (wheel,) = built.glob(f"{package}-*.whl")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {package}
    assert f"{package}/py.typed" in names
    texts = {
        name.rpartition("/")[2]: archive.read(name).decode() for name in names if "info/" in name
    }
    assert (texts.get("entry_points.txt", "").splitlines() or [None])[-1] == command
    said = texts["METADATA"]
    assert sorted(re.findall(r"^Requires-Dist: (.*)$", said, re.MULTILINE)) == required
    assert "License-Expression: MIT" in said
    assert "Classifier: Typing :: Typed" in said
    # On the registry's page, a relative link leads nowhere.
    assert re.findall(r"\]\((?!https?://)[^)]*\)", said) == []


def test_a_source_distribution_has_no_tests_and_no_other_package(built: Path) -> None:
    for archive in built.glob("*.tar.gz"):
        with tarfile.open(archive) as opened:
            names = [name.partition("/")[2] for name in opened.getnames()]
        assert [name for name in names if "test_" in name or name.startswith("tests")] == []
        assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= set(names)


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


# Imports every module of miniddp, and runs the doctor's command, where nothing else is installed.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
import ddp_doctor.__main__, miniddp
for module in pkgutil.walk_packages(miniddp.__path__, "miniddp."):
    importlib.import_module(module.name)
print([name for name in ("labkit", "grader", "numpy") if importlib.util.find_spec(name)])
sys.argv = ["ddp-doctor", "--version"]
ddp_doctor.__main__.main()
"""


def test_both_wheels_work_beside_what_they_require_and_nothing_else(
    built: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    for wheel in built.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)  # what pip does with a wheel of Python files
    # What they require, from the environment of this test, without a download.
    for distribution in required_by("torch"):
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    command = [tmp_path / "venv" / "bin" / "python", "-W", "ignore", "-c", IMPORT_ALL]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "[]\nddp-doctor 0.1.0\n", done.stderr


# The surveys have their own requirements, per environment.
EXTRAS_OF = {
    "src/miniddp": (),
    "src/ddp_doctor": (),
    "src/labkit": ("book",),
    "src/grader": ("grader",),
    "labs": ("book", "grader"),
    "tests": ("book", "grader", "test"),
    "tools": (),
    "book": ("book", "test"),
}


def imported_by(folder: str) -> set[str]:
    """The top-level modules that the Python files below `folder` import."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("folder", EXTRAS_OF)
def test_every_package_that_the_code_imports_is_declared(folder: str) -> None:
    origins = {name: getattr(find_spec(name), "origin", None) for name in imported_by(folder)}
    foreign = {name for name, origin in origins.items() if "site-packages" in str(origin)}
    declared = {canonicalize_name(p) for extra in EXTRAS_OF[folder] for p in EXTRAS[extra]}
    bringing = metadata.packages_distributions()
    brings = {name: set(map(canonicalize_name, bringing[name])) for name in foreign - {"torch"}}
    undeclared = [name for name, brought in brings.items() if not brought & declared]
    assert undeclared == [], f"{folder} imports what pyproject.toml does not declare"


def test_every_extra_is_installed_by_make_at_a_pinned_version() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    constrained = (ROOT / "constraints.txt").read_text().lower()
    for package in {package for packages in EXTRAS.values() for package in packages}:
        known = package.lower() in pinned or f"{package.lower()}==" in constrained
        assert known, f"{package} has no version in requirements.txt or constraints.txt"
