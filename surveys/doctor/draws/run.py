"""Run the doctor on every script of a draw, plain and with --certify, and store what it prints.

    python run.py FOLDER [name ...]    write outputs/NAME.plain.txt, NAME.certify.txt, and NAME.json

It ran once for each draw, on the commit that its README.md names.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(sys.argv[1]).resolve()
DOCTOR = ["-m", "ddp_doctor", "--folder"]
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
ENVIRONMENT = os.environ | QUIET


def both(script: Path) -> None:
    """The two outputs of one script, without the script's own lines on standard output."""
    to = HERE / "outputs" / script.stem
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        said(to.with_suffix(".plain.txt"), ["-m", *launch, *DOCTOR, folder, script.name])
        json = ["--json", str(to.with_suffix(".json")), "--certify", "--ranks", "2"]
        said(to.with_suffix(".certify.txt"), [*DOCTOR, folder, *json, script.name])
    print(script.stem, flush=True)


def said(path: Path, arguments: list[str]) -> None:
    """The command's exit code and the doctor's report, which goes to standard error."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=HERE, env=ENVIRONMENT, capture_output=True, text=True
    )
    path.write_text(f"exit code {done.returncode}\n{done.stdout}\n--- stderr\n{done.stderr}")


if __name__ == "__main__":
    (HERE / "outputs").mkdir(exist_ok=True)
    names = sys.argv[2:]
    scripts = [p for p in sorted(HERE.glob("*_*.py")) if not names or p.stem in names]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(both, scripts))
