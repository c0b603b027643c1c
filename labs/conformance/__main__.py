"""Which trainers hand their optimizer the gradient that they promise: a table.

    python labs/conformance
    python labs/conformance --trainers plain transformers --properties W K WxK

Every trainer takes a step with a tiny random model: 24 samples with 1 to 15 scored tokens. Its
optimizer keeps the gradient. That is compared with one backward of one process, where each token
has the weight that the trainer's documentation promises. The properties:

  W            2 ranks, one micro-batch each
  K            1 process, 3 micro-batches
  WxK          2 ranks, 3 micro-batches each
  order        as WxK with the samples dealt differently: compared with its own WxK
  padding      as W, padded to 32 tokens: compared with its own W
  last-window  1 process; the last step has 2 micro-batches instead of 3
  generation   1 process; samples are generated for two steps at once (reinforcement learning)
  empty-rank   as W, and no sample of rank 1 has a scored token

A cell says equal, or what the gradient is multiplied by: W = 2, K = 3, k/K = 2/3 (the last window),
G = 2 steps per generation, N/N_G (tokens of the step, and of the generation). Where no factor
repairs it, the cell has the ratio and the cosine. A trainer that is not installed is named.
"""

import argparse
import importlib.util
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cases import CASES, Case
from labkit.launch.arguments import parse_arguments
from labkit.launch.scripts import ScriptError, run_script
from labkit.tables import table
from trainers import TRAINERS, version

SECONDS = 180  # for the imports of a job, and 20 more per cell
# Loaded once, for all jobs.
SHARED = "transformers.trainer", "pytorch_lightning"


class Cell(NamedTuple):
    """`text` is printed in the table, and `detail` below it."""

    text: str
    detail: str = ""


Key = tuple[str, str]  # trainer, property


def arguments_of_this_lab() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    some: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    for option, names in (("--trainers", list(TRAINERS)), ("--properties", list(CASES))):
        text = f"default: all of {', '.join(names)}"
        parser.add_argument(option, **some, choices=names, default=names, help=text)
    return parse_arguments(parser)


def main(trainers: Sequence[str], properties: Sequence[str]) -> None:
    needed = dict.fromkeys([*properties, *(CASES[one].base or one for one in properties)])
    keys = [
        (name, one)
        for name in trainers
        for one in needed
        if not TRAINERS[name].missing() and one not in TRAINERS[name].without
    ]
    jobs: dict[tuple[str, int], list[Key]] = defaultdict(list)
    for key in keys:
        jobs[TRAINERS[key[0]].adapter.partition(":")[0], CASES[key[1]].world].append(key)
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as name:
        folder, failures = Path(name), {}
        for (_, world), job in jobs.items():
            failures |= run_job(job, world, folder)
        judged = {key: judge(key, folder, failures) for key in keys}
    print(report(trainers, properties, judged))


def stem(key: Key) -> str:
    """What a cell's files begin with."""
    return f"{list(TRAINERS).index(key[0])}-{list(CASES).index(key[1])}"


def run_job(job: list[Key], world: int, folder: Path) -> dict[Key, str]:
    """Run cells in one set of processes; go on behind a cell that fails. What failed, and why."""
    failures: dict[Key, str] = {}
    loaded = [name for name in SHARED if importlib.util.find_spec(name.partition(".")[0])]
    launch = {"ranks": world if world > 1 else None, "preload": loaded}
    while job:
        words = [word for key in job for word in (stem(key), *key)]
        limit = SECONDS + 20 * len(job)
        try:
            run_script("labs/conformance/one_rank.py", folder, *words, timeout=limit, **launch)
            break
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


def judge(key: Key, folder: Path, failures: dict[Key, str]) -> Cell:
    """Compare a cell's gradient, on every rank, with the wanted one or with its base's."""
    import torch

    from labkit.testing.verdict import verdicts

    case = CASES[key[1]]
    base = (key[0], case.base)
    if why := failures.get(key) or failures.get(base):
        name = why.partition(":")[0]
        return Cell("no step" if name == "NoStepError" else name, why)
    found = [{"": torch.load(folder / f"{stem(key)}.{rank}.pt")} for rank in range(case.world)]
    relatives = torch.load(folder / f"{stem(key)}.wanted.pt")
    if case.base:
        relatives = {"wanted": torch.load(folder / f"{stem(base)}.0.pt")}
    first, *others = verdicts(found, relatives.pop("wanted"))
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


def named(ratio: float, case: Case) -> str:
    """The factor by name, in terms of ranks, micro-batches, and counts; or the number."""
    from ddp_doctor.certificate.measure import called

    counts = (name for name, value in case.factors().items() if abs(ratio / value - 1) < 5e-3)
    return called(ratio, case.world) or next(counts, f"{ratio:.3f}")


def report(trainers: Sequence[str], properties: Sequence[str], judged: dict[Key, Cell]) -> str:
    rows, details, used = [], [], ["torch"]
    for name in trainers:
        trainer = TRAINERS[name]
        cells = [judged.get((name, one), Cell("–")) for one in properties]
        missing = " ".join(trainer.missing())
        promise = f"not installed: pip install {missing}" if missing else trainer.promise
        rows.append([name, promise, *(cell.text for cell in cells)])
        for one, cell in zip(properties, cells, strict=True):
            if cell.detail:
                details.append([name, one, " ".join(cell.detail.split())[:90]])
        used += [one for one in trainer.needs if version(one)]
    versions = ", ".join(f"{one} {version(one)}" for one in dict.fromkeys(used))
    parts = [versions, table(["trainer", "promises", *properties], rows)]
    if details:
        parts.append(table(["trainer", "property", "measured"], details))
    return "\n\n".join(parts)


if __name__ == "__main__":
    arguments = arguments_of_this_lab()
    main(arguments.trainers, arguments.properties)
