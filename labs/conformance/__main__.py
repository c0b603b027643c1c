"""Which trainers hand their optimizer the gradient that they promise: a table.

    python labs/conformance
    python labs/conformance --trainers plain transformers --properties W K WxK

Every trainer takes a step with a tiny random model: 24 samples with 1 to 15 scored tokens. Its
optimizer keeps the gradient. That is compared with one backward of one process, where each token
has the weight that the trainer's documentation promises. The properties:

  W            2 ranks, one micro-batch each
  K            1 process, 3 micro-batches
  W×K          2 ranks, 3 micro-batches each
  order        as W×K with the samples dealt differently: compared with its own W×K
  padding      as W, padded to 32 tokens: compared with its own W
  last-window  1 process; the last step has 2 micro-batches instead of 3
  generation   1 process; samples are generated for two steps at once (reinforcement learning)
  empty-rank   as W, and no sample of rank 1 has a scored token

A cell says equal, or what the gradient is multiplied by: W = 2, K = 3, k/K = 2/3 (the last window),
G = 2 steps per generation, N/N_G (tokens of the step, and of the generation). Where no factor
repairs it, the cell has the ratio and the cosine. A trainer that is not installed is named.
"""

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cases import Case, cases
from labkit.book.tables import table
from labkit.launch.arguments import parse_arguments
from labkit.launch.scripts import ScriptError, run_script
from trainers import TRAINERS, version

NOT = "–"
SECONDS = 60  # for the imports of a job, and 20 more per cell


class Cell(NamedTuple):
    """`text` stands in the table. If it does not say everything, `detail` does."""

    text: str
    detail: str = ""


Key = tuple[str, str]  # trainer, property


def arguments_of_this_lab() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    given = {"nargs": "+", "metavar": "NAME"}
    names, properties = list(TRAINERS), list(cases())
    text = f"default: all of {', '.join(names)}"
    parser.add_argument("--trainers", **given, choices=names, default=names, help=text)
    text = "default: all of the above; WxK is W×K"
    parser.add_argument(
        "--properties", **given, type=written, choices=properties, default=properties, help=text
    )
    return parse_arguments(parser)


def written(name: str) -> str:
    return "W×K" if name == "WxK" else name


def main(trainers: Sequence[str], properties: Sequence[str]) -> None:
    installed = [name for name in trainers if not TRAINERS[name].missing()]
    needed = [*properties, *(base for one in properties if (base := cases()[one].base))]
    keys = [
        (name, one)
        for name in installed
        for one in dict.fromkeys(needed)
        if one not in TRAINERS[name].without
    ]
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failures: dict[Key, str] = {}
        jobs: dict[tuple[str, int], list[Key]] = defaultdict(list)
        for key in keys:
            jobs[TRAINERS[key[0]].file, cases()[key[1]].world].append(key)
        for (_, world), job in jobs.items():
            failures |= run_job(job, world, folder, keys)
        judged = {key: judge(key, keys, folder, failures) for key in keys}
    print(report(trainers, properties, judged))


def run_job(job: list[Key], world: int, folder: Path, keys: list[Key]) -> dict[Key, str]:
    """Run the cells in one set of processes; after a failure, go on behind it. What failed."""
    failures = {}
    while job:
        words = [word for key in job for word in (keys.index(key), *key)]
        limit = SECONDS + 20 * len(job)
        script = "labs/conformance/one_rank.py"
        try:
            run_script(script, folder, *words, ranks=world if world > 1 else None, timeout=limit)
        except ScriptError as error:
            left = [key for key in job if not complete(keys.index(key), world, folder)]
            why = reason(keys.index(left[0]), folder, error) if left else ""
            if not why:  # it failed outside of every cell
                return failures | dict.fromkeys(left, error.said.strip().rpartition("\n")[2])
            failures[left[0]] = why
            job = left[1:]
        else:
            break
    return failures


def complete(number: int, world: int, folder: Path) -> bool:
    return all((folder / f"{number}.{rank}.pt").exists() for rank in range(world))


def reason(number: int, folder: Path, error: ScriptError) -> str:
    """The first rank's error, or that the cell hangs, or nothing."""
    errors = sorted(folder.glob(f"{number}.*.error"), key=lambda path: path.stat().st_mtime)
    if errors:
        return errors[0].read_text()
    return "hangs" if error.exit_code is None else ""


def judge(key: Key, keys: list[Key], folder: Path, failures: dict[Key, str]) -> Cell:
    """Compare a cell's gradient, on every rank, with the wanted one or with its base's."""
    import torch

    from labkit.testing.verdict import verdicts

    case = cases()[key[1]]
    base = (key[0], case.base)
    for one in (key, base):
        if one in failures:
            error = failures[one]
            name = error.partition(":")[0]
            return Cell("no step" if name == "NoStepError" else name, error)
    number = keys.index(key)
    found = [{"": torch.load(folder / f"{number}.{rank}.pt")} for rank in range(case.world)]
    relatives = torch.load(folder / f"{number}.wanted.pt")
    if case.base:
        relatives = {"wanted": torch.load(folder / f"{keys.index(base)}.0.pt")}
    first, *others = verdicts(found, relatives["wanted"])
    if others:
        return Cell("ranks differ", "; ".join(str(one.comparison) for one in (first, *others)))
    if first.kind == "right":
        return Cell("equal")
    if first.kind in ("not finite", "zero"):
        return Cell("NaN" if first.kind == "not finite" else "zero", first.kind)
    ratio, cosine = first.comparison
    if first.kind == "scale bug":
        called = named(ratio, case)
        return Cell(called or f"×{ratio:.3f}", f"{first.comparison}, factor {called or ratio}")
    why = ""
    for name, one in relatives.items():
        if (relative := verdicts(found, one)[0]).kind in ("right", "scale bug"):
            times = relative.comparison.ratio
            of = f"{named(times, case) or f'{times:.3f}'} × " if relative.kind != "right" else ""
            why = why or f": {of}{name}"
    return Cell(f"{ratio:.2f} ∠ {cosine:.3f}", f"{first.comparison}{why}")


def named(ratio: float, case: Case) -> str | None:
    """The factor by name, in terms of ranks, micro-batches, and counts."""
    from ddp_doctor.certificate.measure import called

    counts = (name for name, value in case.factors().items() if abs(ratio / value - 1) < 5e-3)
    return called(ratio, case.world, case.steps) or next(counts, None)


def report(trainers: Sequence[str], properties: Sequence[str], judged: dict[Key, Cell]) -> str:
    rows, details, sources = [], [], []
    for name in trainers:
        trainer = TRAINERS[name]
        if missing := trainer.missing():
            row = [f"not installed: pip install {' '.join(missing)}", *[""] * len(properties)]
        else:
            row = [trainer.promise]
            for one in properties:
                cell = judged.get((name, one), Cell(NOT))
                row.append(cell.text)
                if cell.detail:
                    details.append([name, one, " ".join(cell.detail.split())[:90]])
        rows.append([name, *row])
        sources += [one for one in trainer.needs if version(one)]
    versions = ", ".join(f"{one} {version(one)}" for one in dict.fromkeys(["torch", *sources]))
    parts = [versions, table(["trainer", "promises", *properties], rows)]
    if details:
        parts.append(table(["trainer", "property", "measured"], details))
    return "\n\n".join(parts)


if __name__ == "__main__":
    arguments = arguments_of_this_lab()
    main(arguments.trainers, arguments.properties)
