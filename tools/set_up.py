"""Make the environment that every target of the Makefile uses. Needs nothing but Python.

    python tools/set_up.py .venv [--reuse ENVIRONMENT] [--pip-options OPTIONS]

uv installs the packages of locked.txt, several times faster than pip does. It gets what pip is
configured to use. Where uv cannot be had, cannot do what pip is told, or fails, pip installs them.
Both refuse a file whose hash is not in locked.txt, which leaves torch out: its builds differ.

With `--reuse`, torch is not installed but taken from another virtual environment, for example one
with a CUDA build. That environment is only read: a .pth file puts its packages on the new one's
path, after the new one's own.
"""

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LOCKED = ROOT / "locked.txt"  # what constraints.txt pins, but torch; with hashes
LOG = "install.log"  # in the environment
READY = ".ready"  # the Makefile makes this file in an environment once that is complete
OLDEST_TORCH = (2, 11)  # as in pyproject.toml
OLDEST_PYTHON = (3, 11)
BROKEN_PYTHON = (3, 14, 1)  # networkx, which torch needs, does not run on it
# Printed as JSON by the Python of the environment that is reused.
ASKED = """
import json, sys, sysconfig
torch = ""
try:
    import importlib.metadata
    torch = importlib.metadata.version("torch")
except ImportError:  # no torch, or a Python before 3.8
    pass
paths = sysconfig.get_paths()
json.dump([sys.version_info[:3], torch, [paths["purelib"], paths["platlib"]]], sys.stdout)
"""
PIP = ("-m", "pip", "--disable-pip-version-check")
# pip's settings that uv has, too, as an option or as an environment variable; the lists add up.
LISTS = {
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
VALUES = {"cache-dir": "--cache-dir"}
FLAGS = {"no-index": "--no-index", "no-cache-dir": "--no-cache"}
# An index's address may hold a password, which a command line would show to other users.
INDEXES = "extra-index-url"
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
}
# What pip says or asks, and not what it installs.
ONLY_SHOWN = {
    "disable-pip-version-check",
    "no-color",
    "no-input",
    "progress-bar",
    "root-user-action",
}


def not_usable(version: tuple) -> str:
    """Why not, in one line, or nothing."""
    number = ".".join(map(str, version[:3]))
    if version < OLDEST_PYTHON:
        return f"Python {number}; 3.11 or newer is needed"
    return f"Python {number}, which networkx excludes" if version[:3] == BROKEN_PYTHON else ""


# First of all: an old Python fails at the annotations below. It has to parse this file, though.
if not_usable(sys.version_info):
    sys.exit(
        f"{sys.executable} is {not_usable(sys.version_info)}. "
        "Choose another: make … PYTHON=python3.12"
    )


class Reused(NamedTuple):
    """A virtual environment that has torch."""

    python: Path
    torch: str
    folders: list[str]
    """where its packages lie"""


class Installer(NamedTuple):
    """`pip install` or `uv pip install`, with its options and its environment variables."""

    words: list[str]
    variables: dict[str, str]


class UvUnusableError(Exception):
    """The message says why."""


def look_at(environment: Path) -> Reused:
    """The reusable part of `environment`; raises ValueError with the reason if there is none."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise ValueError(f"VENV is {environment}, and there is no {python}")
    try:
        told = subprocess.run([python, "-c", ASKED], capture_output=True, text=True, check=True)
        version, torch, folders = json.loads(told.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "").strip() or str(error)
        raise ValueError(f"{python} does not run: {said.splitlines()[-1]}") from error
    if not_usable(tuple(version)):
        raise ValueError(f"{python} is {not_usable(tuple(version))}")
    if not torch:
        raise ValueError(f"{environment} has no torch to reuse: leave VENV out to install one")
    if tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        raise ValueError(f"{environment} has torch {torch}; 2.11 or newer is needed")
    return Reused(python, torch, sorted(set(folders)))


def make(environment: Path, reuse: Path | None, options: list[str]) -> None:
    """Make `environment`; `options` are pip's, and what the installers print is in its install.log.

    Raises ValueError if `reuse` cannot be reused, and CalledProcessError if pip fails.
    """
    if reuse and reuse.resolve() == environment.resolve():
        raise ValueError(
            f"VENV names {reuse}, which is the environment that this command makes; name another "
            "one to reuse"
        )
    reused = look_at(reuse.resolve()) if reuse else None
    print("1 of 3: a new environment", flush=True)
    # A torch that an interrupted run has left must not come before the one to reuse.
    clear = ["--clear"] if reused and not (environment / READY).exists() else []
    python = reused.python if reused else sys.executable
    subprocess.run([python, "-m", "venv", *clear, environment], check=True)
    pip = Installer([str(environment / "bin" / "python"), *PIP, "install", *options], {})
    try:
        install(environment, uv(environment, pip, options), reused)
    except (UvUnusableError, subprocess.CalledProcessError) as error:
        reason = f"see {environment / LOG}" if hasattr(error, "cmd") else error
        print(f"uv cannot be used ({reason}): pip installs, which takes minutes", flush=True)
        install(environment, Installer([*pip.words, "--no-compile"], {}), reused)
    if reused:
        # Python reads .pth files after its own folder: what is installed here comes first.
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "reused.pth").write_text("\n".join(reused.folders) + "\n")
        print(f"torch {reused.torch} comes from {reuse}, which is not changed.")


def install(environment: Path, installer: Installer, reused: Reused | None) -> None:
    """Install what locked.txt lists, then torch with what its build needs, and the project."""
    packages = re.findall(r"^\w.*==", LOCKED.read_text(), re.MULTILINE)
    print(f"2 of 3: {len(packages)} packages", flush=True)
    variables = dict(installer.variables)
    if {"UV_INDEX", "UV_EXTRA_INDEX_URL"} & {*variables, *os.environ}:
        # Any of several indexes may serve a file: its hash says that it is the right one.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    hashed = installer._replace(variables=variables)
    run(environment, hashed, "--no-deps", "-r", str(LOCKED))
    print("3 of 3: this project" if reused else "3 of 3: torch and this project", flush=True)
    torch = ["--no-deps"] if reused else ["-c", str(CONSTRAINTS)]
    run(environment, installer, *torch, "--no-build-isolation", "--editable", str(ROOT))


def uv(environment: Path, pip: Installer, options: list[str]) -> Installer:
    """uv with pip's settings, installed by pip. Raises UvUnusableError or CalledProcessError."""
    (own,) = re.findall(r"^uv==[^#]*?\n(?=\S)", LOCKED.read_text(), re.MULTILINE)
    (environment / "uv.txt").write_text(own)
    asked = [*pip.words[:4], "config", "list"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    words, variables = for_uv([*configured(listed), *options])
    run(environment, pip, "--no-deps", "-r", str(environment / "uv.txt"))
    command = [str(environment / "bin" / "uv"), "pip", "install", "--python", pip.words[0]]
    return Installer([*command, *words], variables)


def configured(listed: str) -> list[str]:
    """What `pip config list` prints, as options of `pip install`: the files', then `PIP_…`."""
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):  # as pip does: a later one replaces
        for line in listed.splitlines():
            if line.startswith(section):
                name, _, value = line.removeprefix(section).partition("=")
                settings[name] = ast.literal_eval(value)
    options = []
    for name, value in settings.items():
        if name in FLAGS:
            options += [f"--{name}"] if value.lower() in ("1", "true", "yes", "on") else []
        elif name not in ONLY_SHOWN and name != "config-file":
            values = value.split() if name in (*LISTS, INDEXES) else [value]
            options += [f"--{name}={one}" for one in values]
    return options


def for_uv(options: list[str]) -> tuple[list[str], dict[str, str]]:
    """uv's options and environment variables for these of pip's. Raises UvUnusableError."""
    short = {"index-url": ["-i"], "find-links": ["-f"], "constraint": ["-c"]}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in (*LISTS, *VALUES, INDEXES, *VARIABLES):
        parser.add_argument(f"--{name}", *short.get(name, []), action="append", dest=name)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true", dest=name)
    for name in ONLY_SHOWN - {"progress-bar", "root-user-action"}:
        parser.add_argument(f"--{name}", action="store_true", dest=name)
    try:
        given, unknown = parser.parse_known_args(options)
    except argparse.ArgumentError as error:
        raise UvUnusableError(f"pip's options: {error}") from error
    if unknown:
        raise UvUnusableError(f"it has no {unknown[0]}")
    told = {name: value for name, value in vars(given).items() if value}
    words = [f"{LISTS[name]}={one}" for name in told if name in LISTS for one in told[name]]
    words += [f"{VALUES[name]}={told[name][-1]}" for name in told if name in VALUES]
    words += [FLAGS[name] for name in told if name in FLAGS]
    variables = {VARIABLES[name]: told[name][-1] for name in told if name in VARIABLES}
    if INDEXES in told:
        variables["UV_INDEX"] = " ".join(told[INDEXES])
    return words, variables


def run(environment: Path, installer: Installer, *words: str) -> None:
    """Run it, and keep what it prints in the log; a terminal shows the last line meanwhile."""
    shown = sys.stdout.isatty()
    command = [*installer.words, *words]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipe["env"] = {**os.environ, **installer.variables}
    with open(environment / LOG, "a") as log, subprocess.Popen(command, **pipe) as process:
        for line in process.stdout:
            log.write(line)
            if shown:
                print(f"\r\033[K  {line.strip()[:76]}", end="", flush=True)
        if shown:
            print("\r\033[K", end="", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path)
    parser.add_argument("--reuse", type=Path, help="a virtual environment that has torch")
    parser.add_argument("--pip-options", default="", help="for pip install, in one string")
    arguments = parser.parse_args()
    try:
        make(arguments.environment, arguments.reuse, shlex.split(arguments.pip_options))
    except ValueError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        log = arguments.environment / LOG
        last = log.read_text().splitlines()[-12:] if log.exists() else []
        sys.exit("\n".join([*last, f"{shlex.join(map(str, error.cmd))} failed; see {log}"]))


if __name__ == "__main__":
    main()
