"""The tests of miniddp on another version of torch, in an environment outside of the checkout.

    make versions TORCH=2.15.0

Makes a scratch environment, installs that torch and miniddp's wheel into it, runs `tests/miniddp`
and PyTorch's own DDP tests there, and prints one row of the table in tools/README.md. The
environment is removed at the end. From PyPI, torch for Linux brings CUDA packages of 5.6 GB; set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu for the CPU build.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import set_up  # ends this here, if Python is too old

ROOT = set_up.ROOT
# What the tests of miniddp import besides torch; pinned by constraints.txt.
NEEDED = ("cloudpickle", "expecttest", "hypothesis", "matplotlib", "numpy", "psutil", "pytest")


def install(python: Path, version: str) -> str:
    """Install torch and what the tests need; return the version that was installed."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={version}"], check=True)
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if line.partition("==")[0].lower() in NEEDED]
    subprocess.run([*pip, *pins, str(ROOT)], check=True)
    show = [python, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()


def own_tests(python: Path, environment: dict[str, str]) -> str:
    """`passed / run` of tests/miniddp; prints the names of those that fail."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--import-mode=importlib", "tests/miniddp"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    for line in re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE):
        print(line, file=sys.stderr)
    if not counts:
        raise SystemExit(f"pytest ran no test:\n{done.stdout}\n{done.stderr}")
    return f"{counts.get('passed', 0)} / {sum(counts.values())}"


def torchs_tests(python: Path, environment: dict[str, str], cls: str, folder: Path) -> str:
    """`passed / run` of the DDP tests that ship inside torch, on `cls`."""
    results = folder / f"{cls}.json"
    command = [python, "-m", "tests.torch_suite", "--class", cls, "--json", results]
    command += ["--timeout", "600"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if not results.exists():
        raise SystemExit(f"{' '.join(map(str, command))} wrote no results:\n{done.stderr}")
    outcomes = [result["outcome"] for result in json.loads(results.read_text())]
    run = [outcome for outcome in outcomes if outcome != "skipped"]
    return f"{run.count('passed')} / {len(run)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="of torch, for example 2.15.0")
    version = parser.parse_args().version
    with tempfile.TemporaryDirectory(prefix="torch-versions-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        installed = install(python, version)
        # The package comes from its wheel; of src/, the tests need labkit, which needs grader.
        for package in ("labkit", "grader"):
            (folder / package).symlink_to(ROOT / "src" / package)
        environment = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"}
        row = [
            installed,
            datetime.date.today().isoformat(),
            own_tests(python, environment),
            torchs_tests(python, environment, "torch", folder),
            torchs_tests(python, environment, "miniddp", folder),
        ]
    print("| torch | date | tests/miniddp | PyTorch's DDP tests on torch's class | on miniddp |")
    print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
