"""Run the cells of trainers in sets of processes, and judge what their optimizers got."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.launch.forks import NotStartedError
from labkit.launch.scripts import ScriptError, run_script
from surveys.trainers.trainers import TRAINERS

SECONDS = 180  # for the imports of a job, and 20 more per cell
# The ranks are new processes, which import this package from the checkout's root.
QUIET = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
QUIET["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
# Loaded once, for all jobs.
SHARED = "transformers.trainer", "pytorch_lightning"


class Cell(NamedTuple):
    """`text` is printed in the table, and `detail` below it."""

    text: str
    detail: str = ""


Key = tuple[str, str]  # trainer, property
Judged = dict[Key, Cell]


def measure(trainers: Sequence[str], properties: Sequence[str]) -> Judged:
    """The cells of the trainers that are installed."""
    keys = [
        (name, one)
        for name in trainers
        for one in needed(name, properties)
        if not TRAINERS[name].missing()
    ]
    jobs: dict[tuple[str, int], list[Key]] = defaultdict(list)
    for key in keys:
        jobs[TRAINERS[key[0]].adapter.partition(":")[0], case_of(key).world].append(key)
    os.environ.update(QUIET)
    with tempfile.TemporaryDirectory() as name:
        folder, failures = Path(name), {}
        for (_, world), job in jobs.items():
            failures |= run_job(job, world, folder)
        return {key: judge(key, folder, failures) for key in keys if key[1] in properties}


def needed(name: str, properties: Sequence[str]) -> list[str]:
    """Those that the trainer has, and those with which they are compared."""
    cases = {one: TRAINERS[name].family.cases[one] for one in properties if TRAINERS[name].has(one)}
    return list(dict.fromkeys([*cases, *(case.base or one for one, case in cases.items())]))


def case_of(key: Key) -> Any:
    return TRAINERS[key[0]].family.cases[key[1]]


def stem(key: Key) -> str:
    """What a cell's files begin with."""
    return f"{list(TRAINERS).index(key[0])}-{list(TRAINERS[key[0]].family.cases).index(key[1])}"


def run_job(job: list[Key], world: int, folder: Path) -> dict[Key, str]:
    """Run cells in one set of processes; go on behind a cell that fails. What failed, and why."""
    failures: dict[Key, str] = {}
    loaded = [name for name in SHARED if importlib.util.find_spec(name.partition(".")[0])]
    launch = {"ranks": world if world > 1 else None, "preload": loaded}
    while job:
        words = [word for key in job for word in (stem(key), *key)]
        limit = SECONDS + 20 * len(job)
        try:
            run_script("surveys/trainers/one_rank.py", folder, *words, timeout=limit, **launch)
            break
        except NotStartedError as error:
            raise RuntimeError(f"No process could be started. {cause(loaded)}") from error
        except ScriptError as error:
            done = [len(list(folder.glob(f"{stem(key)}.[0-9].pt"))) == world for key in job]
            left = [key for key, complete in zip(job, done, strict=True) if not complete]
            errors = [path for key in left[:1] for path in folder.glob(f"{stem(key)}.*.error")]
            if errors:
                first = min(errors, key=lambda path: path.stat().st_mtime)
                failures[left[0]] = first.read_text()
            elif left and error.exit_code is None:
                failures[left[0]] = "hangs"
            else:  # it failed outside of every cell
                return failures | dict.fromkeys(left, str(error).strip().rpartition("\n")[2])
            job = left[1:]
    return failures


def cause(modules: list[str]) -> str:
    """What a new interpreter says of the modules that all jobs load."""
    command = [
        sys.executable,
        "-c",
        "; ".join(f"import {name}" for name in ("labkit.launch.supervisor", *modules)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] or "Their imports succeed."


def judge(key: Key, folder: Path, failures: dict[Key, str]) -> Cell:
    """Compare a cell's gradient, on every rank, with the wanted one or with its base's."""
    import torch

    from labkit.testing.compare import verdicts

    case = case_of(key)
    base = (key[0], case.base)
    if why := failures.get(key) or failures.get(base):
        name = why.partition(":")[0]
        return Cell("no step" if name == "NoStepError" else name, why)
    found = [{"": torch.load(folder / f"{stem(key)}.{rank}.pt")} for rank in range(case.world)]
    if case.base:
        relatives = {"wanted": torch.load(folder / f"{stem(base)}.0.pt")}
    else:
        relatives = torch.load(folder / f"{stem(key)}.wanted.pt")
    wanted = relatives.pop("wanted")
    if not any(tensor.any() for tensor in wanted):
        return Cell("zero", f"{case.base} has no gradient")
    first, *others = verdicts(found, wanted)
    if others:
        return Cell("ranks differ", "; ".join(str(one.comparison) for one in (first, *others)))
    ratio, cosine = first.comparison
    if first.kind == "right":
        return Cell("equal")
    if first.kind == "scale bug":
        factor = named(ratio, case)
        return Cell(factor, f"{first.comparison}, factor {factor}")
    if first.kind != "direction bug":
        return Cell(first.kind)
    related = (
        f": {named(relative.comparison.ratio, case)} × {name}"
        for name, one in relatives.items()
        if (relative := verdicts(found, one)[0]).kind in ("right", "scale bug")
    )
    return Cell(f"{ratio:.2f} ∠ {cosine:.3f}", f"{first.comparison}{next(related, '')}")


def named(ratio: float, case: Any) -> str:
    """The factor by name, in terms of ranks, micro-batches, and counts; or the number."""
    from ddp_doctor.certificate.measure import factor_name

    counts = (name for name, value in case.factors().items() if abs(ratio / value - 1) < 5e-3)
    return factor_name(ratio, case.world) or next(counts, f"{ratio:.3f}")
