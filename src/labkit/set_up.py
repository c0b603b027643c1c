"""Make the environment that every target of the Makefile uses. Needs nothing but Python.

    python src/labkit/set_up.py .venv [--reuse ENVIRONMENT] [--pip-options OPTIONS]

With `--reuse`, torch is not installed but taken from another virtual environment, for example one
with a CUDA build. That environment is only read: a .pth file puts its packages on the new one's
path, after the new one's own. Everything else is installed into the new one, at the versions of
constraints.txt.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LOG = "pip.log"  # in the environment
READY = ".ready"  # the Makefile makes this file in an environment once that is complete
OLDEST_TORCH = (2, 11)  # as in pyproject.toml
OLDEST_PYTHON = (3, 11)
EDITABLE = f"{ROOT}[book,doctor,grader,notebook,test]"
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
json.dump([sys.version_info[:2], torch, [paths["purelib"], paths["platlib"]]], sys.stdout)
"""


class Reused(NamedTuple):
    """A virtual environment that has torch."""

    python: Path
    torch: str
    folders: list[str]
    """where its packages lie"""


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
    if tuple(version) < OLDEST_PYTHON:
        raise ValueError(f"{python} is Python {version[0]}.{version[1]}; 3.11 or newer is needed")
    if not torch:
        raise ValueError(f"{environment} has no torch to reuse: leave VENV out to install one")
    if tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        raise ValueError(f"{environment} has torch {torch}; 2.11 or newer is needed")
    return Reused(python, torch, sorted(set(folders)))


def without_torch(constraints: str) -> list[str]:
    """The lines of constraints.txt, which pins everything, except the one of torch."""
    return [line for line in constraints.splitlines() if not line.startswith("torch==")]


def make(environment: Path, reuse: Path | None, options: list[str]) -> None:
    """Make `environment`. Raises ValueError if `reuse` cannot be reused, and CalledProcessError if
    pip fails; what pip prints is in `environment`/pip.log.
    """
    if reuse and reuse.resolve() == environment.resolve():
        raise ValueError(
            f"VENV names {reuse}, which is the environment that this command makes; name another "
            "one to reuse"
        )
    reused = look_at(reuse.resolve()) if reuse else None
    python = reused.python if reused else Path(sys.executable)
    # A torch that an interrupted run has left must not come before the one to reuse.
    clear = ["--clear"] if reused and not (environment / READY).exists() else []
    subprocess.run([python, "-m", "venv", *clear, environment], check=True)
    if not reused:
        files = ["-r", ROOT / "requirements.txt", "-c", ROOT / "constraints.txt"]
        pip_install(environment, [*options, *files, "--editable", EDITABLE])
        return
    # Without dependencies, because pip would install torch as a dependency of the others.
    pins = environment / "without-torch.txt"
    pins.write_text("\n".join(without_torch((ROOT / "constraints.txt").read_text())) + "\n")
    pip_install(environment, [*options, "--no-deps", "-r", pins])
    pip_install(environment, [*options, "--no-deps", "--no-build-isolation", "--editable", ROOT])
    # Python reads .pth files after its own folder: what is installed here comes first.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "reused.pth").write_text("\n".join(reused.folders) + "\n")
    print(f"torch {reused.torch} comes from {reuse}, which is not changed.")


def pip_install(environment: Path, words: list[str | Path]) -> None:
    """Run pip there, without its warnings and notices on the terminal: they go to the log."""
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]
    with open(environment / LOG, "a") as log:
        subprocess.run([*pip, *words], check=True, stdout=log, stderr=log)


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
