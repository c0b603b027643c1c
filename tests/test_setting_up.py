"""`make` sets up .venv: with pip's options, or with the torch of another environment, only read."""

import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from labkit.launch.scripts import project_root
from tools import set_up

ROOT = project_root()
LOCKED = (ROOT / "locked.txt").read_text()


def with_torch(folder: Path, version: str | None) -> Path:
    """A virtual environment whose torch is a package of one line."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/*/site-packages")
    if version:
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        info = site / f"torch-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but what Python keeps of modules that were imported."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path): path.read_bytes() for path in files}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What setting up needs of a checkout."""
    for name in (
        *("Makefile", "requirements.txt", "constraints.txt", "locked.txt", "pyproject.toml"),
        "tools/set_up.py",
    ):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


def make(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`make WORDS` there, without the settings of pip and make that this test was started with."""
    alien = ("PIP_", "MAKE", "MFLAGS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(alien)}
    environment["PIP_CONFIG_FILE"] = os.devnull
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *words]
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The installers' commands, which are kept instead of run; new environments have no pip."""
    kept, run = [], subprocess.run

    def without_pip(command, **options):
        if "config" in command:
            listed = "global.find-links='/wheels'\n:env:.timeout='7'\n"
            return subprocess.CompletedProcess(command, 0, stdout=listed)
        return run([*command, "--without-pip"] if "venv" in command else command, **options)

    monkeypatch.setattr(subprocess, "run", without_pip)
    monkeypatch.setattr(
        set_up, "run", lambda _, installer, *words: kept.append([*installer.words, *words])
    )
    return kept


def test_pips_options_reach_pip_and_a_failure_leaves_nothing_that_looks_ready(checkout):
    done = make(checkout, "book", "PIP_OPTIONS=--no-index --retries 0")
    assert done.returncode == 2
    assert "uv cannot be used" in done.stdout
    # With an index, pip would have found it; `--no-index` is what made it fail.
    assert "No matching distribution found for" in done.stderr
    assert "--no-index --retries 0" in done.stderr
    assert "No matching distribution" in (checkout / ".venv" / set_up.LOG).read_text()
    assert "Traceback" not in done.stderr
    assert not (checkout / ".venv" / ".ready").exists()


def test_a_torch_that_is_there_is_reused_and_its_environment_is_only_read(
    checkout, tmp_path, installed
):
    other = with_torch(tmp_path / "other", "2.14.1")
    before = contents(other)
    set_up.make(checkout / ".venv", other, ["--proxy", "http://127.0.0.1:1"])

    ours = checkout / ".venv" / "bin" / "python"
    show = [ours, "-c", "import torch; print(torch.__version__, torch.__file__)"]
    told = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert told.startswith(f"2.14.1 {other}")
    of_pip, *of_uv = installed
    assert of_pip[0] == str(ours)
    assert of_pip[-5:-3] == ["--proxy", "http://127.0.0.1:1"]
    assert of_pip[-1] == str(checkout / ".venv" / "uv.txt")
    assert Path(of_pip[-1]).read_text().startswith("uv==")
    assert len(of_uv) == 2
    assert all(command[3:5] == ["--python", str(ours)] for command in of_uv)
    assert all("--find-links=/wheels" in command and "--no-deps" in command for command in of_uv)

    (checkout / ".venv" / ".ready").write_text(f"{other}\n")
    assert make(checkout, "clean").returncode == 0
    assert not (checkout / ".venv").exists()
    assert contents(other) == before


def test_uv_gets_what_pip_is_configured_to_use():
    listed = """global.cert='/of/the/file.pem'
global.constraint='/one.txt'
global.extra-index-url='\\nhttps://a/simple\\nhttps://b/simple'
global.no-index='false'
install.timeout='5'
:env:.cert='/of/the/environment.pem'
:env:.disable-pip-version-check='1'
"""
    options = [*set_up.configured(listed), "-f", "/wheels", "--no-cache-dir"]
    words, variables = set_up.for_uv(options)
    assert set(words) == {"--find-links=/wheels", "--constraint=/one.txt", "--no-cache"}
    assert variables == {
        "SSL_CERT_FILE": "/of/the/environment.pem",
        "UV_HTTP_TIMEOUT": "5",
        "UV_INDEX": "https://a/simple https://b/simple",
    }


@pytest.mark.parametrize("option", ["--target=/elsewhere", "--proxy"])
def test_what_uv_cannot_do_as_pip_does_is_left_to_pip(option):
    with pytest.raises(set_up.UvUnusableError, match=option.partition("=")[0]):
        set_up.for_uv([option])


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_everything_that_the_requirements_need_in_turn_is_pinned(system):
    """constraints.txt is installed without dependencies, but for those of torch."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    required = (ROOT / "requirements.txt").read_text().splitlines()
    assert {line for line in required if "==" in line} <= set(pins)
    pinned = {canonicalize_name(line.partition("==")[0]) for line in pins}
    there = {"extra": "", "platform_system": system, "sys_platform": system.lower()}
    missing = set()
    # What torch needs depends on its build; appnope is there on a Mac only, and needs nothing.
    for name in sorted(pinned - {"torch", "appnope"}):
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate(there):
                missing |= {canonicalize_name(needed.name)} - pinned
    assert missing == set()


def test_what_is_installed_without_dependencies_is_what_is_pinned_and_has_hashes():
    entry = r"^(\S+)==(\S+).*\\\n(?: +--hash=sha256:\w{64}(?: \\)?\n)+"
    locked = re.findall(entry, LOCKED, re.MULTILINE)
    assert len(locked) == len(re.findall(r"^\w", LOCKED, re.MULTILINE))
    pins = re.findall(r"^(\S+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    without_torch = {(canonicalize_name(n), v) for n, v in pins if n != "torch"}
    assert set(locked) == without_torch


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.12.0", "3.13.0", "3.14.0", "3.14.2"])
def test_every_pinned_package_takes_this_python(python):
    names = re.findall(r"^(\w[^= ]*)==(?!.*darwin)", LOCKED, re.M)
    taken = {name: importlib.metadata.metadata(name)["Requires-Python"] for name in names}
    assert [name for name in taken if python not in SpecifierSet(taken[name] or "")] == []


@pytest.mark.parametrize("version", [(3, 6, 15), (3, 10, 13), (3, 14, 1)])
def test_a_python_that_cannot_be_used_is_refused_in_one_line(version, monkeypatch):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit, match=rf"^.* is Python 3\.{version[1]}\..*PYTHON=.*$"):
        runpy.run_path(str(ROOT / "tools" / "set_up.py"))


def test_an_environment_that_is_set_up_is_not_turned_into_another_one(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".ready").write_text("\n")
    done = make(checkout, "book", "VENV=/elsewhere")
    assert done.returncode == 2
    assert "run make clean first, to reuse /elsewhere" in done.stderr
    (checkout / ".venv" / ".ready").write_text("/elsewhere\n")
    assert make(checkout, "help", "VENV=/elsewhere").returncode == 0
    assert make(checkout, "help").returncode == 0


def test_an_environment_that_cannot_be_reused_is_refused_with_the_reason(tmp_path):
    bare, other = with_torch(tmp_path / "bare", None), with_torch(tmp_path / "other", "2.9.1")
    refused = {
        bare: "has no torch to reuse",
        other: "has torch 2.9.1; 2.11 or newer",
        tmp_path / "nothing": r"there is no .*/bin/python",
    }
    for folder, said in refused.items():
        with pytest.raises(ValueError, match=said):
            set_up.make(tmp_path / ".venv", folder, [])
    with pytest.raises(ValueError, match="name another one"):
        set_up.make(other, other, [])
    (other / "bin" / "python").unlink()
    (other / "bin" / "python").write_text("#!/bin/sh\necho ImportError: no library >&2; exit 1")
    (other / "bin" / "python").chmod(0o755)
    with pytest.raises(ValueError, match="does not run: ImportError: no library"):
        set_up.make(tmp_path / ".venv", other, [])
    assert not (tmp_path / ".venv").exists()
