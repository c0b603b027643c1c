"""Which trainers hand their optimizer the gradient that they promise: a table.

    python surveys/trainers
    python surveys/trainers --trainers plain transformers --properties W K WxK
    python surveys/trainers --store          # and print the results on the page of the book

Every trainer takes a step with a tiny random model. Its optimizer keeps the gradient. That is
compared with one backward of one process, which computes what the trainer's documentation promises.
A cell says equal, or what the gradient is multiplied by: W = 2, K = 3, k/K = 2/3 (the last window),
G = 2 steps per generation, N/N_G (tokens of the step, and of the generation). Where no factor
repairs it, the cell has the ratio and the cosine. A trainer that is not installed is named.

The properties:
"""

import argparse
import importlib.util
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from families import FAMILIES, PROPERTIES, properties
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
Judged = dict[Key, Cell]


def arguments_of_this_lab() -> argparse.Namespace:
    listed = "".join(f"  {name:12} {text}\n" for name, (text, _) in PROPERTIES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    some: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    for option, names in (("--trainers", list(TRAINERS)), ("--properties", properties())):
        text = f"default: all of {', '.join(names)}"
        parser.add_argument(option, **some, choices=names, default=names, help=text)
    parser.add_argument("--store", action="store_true", help="needs all properties")
    given = parse_arguments(parser)
    if given.store and given.properties != properties():
        parser.error("--store replaces whole rows: leave --properties out.")
    return given


def main(trainers: Sequence[str], properties: Sequence[str], store: bool) -> None:
    keys = [
        (name, one)
        for name in trainers
        for one in needed(name, properties)
        if not TRAINERS[name].missing()
    ]
    jobs: dict[tuple[str, int], list[Key]] = defaultdict(list)
    for key in keys:
        jobs[TRAINERS[key[0]].adapter.partition(":")[0], case_of(key).world].append(key)
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as name:
        folder, failures = Path(name), {}
        for (_, world), job in jobs.items():
            failures |= run_job(job, world, folder)
        judged = {key: judge(key, folder, failures) for key in keys if key[1] in properties}
    print(report(trainers, properties, judged))
    if store:
        from page import store_rows

        store_rows(judged)


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
    from ddp_doctor.certificate.measure import called

    counts = (name for name, value in case.factors().items() if abs(ratio / value - 1) < 5e-3)
    return called(ratio, case.world) or next(counts, f"{ratio:.3f}")


def report(trainers: Sequence[str], properties: Sequence[str], judged: Judged) -> str:
    """The versions, a table per family, and what was measured where a cell is not equal."""
    used = dict.fromkeys(["torch", *(one for name in trainers for one in TRAINERS[name].needs)])
    parts = [", ".join(f"{one} {version(one)}" for one in used if version(one))]
    for family in FAMILIES.values():
        members = [name for name in trainers if TRAINERS[name].family == family]
        columns = [one for one in properties if one in family.columns]
        if members and columns:
            parts.append(table_of(members, columns, judged))
    details = [
        [*key, " ".join(cell.detail.split())[:90]]
        for key, cell in judged.items()
        if cell.detail and key[1] in properties
    ]
    if details:
        parts.append(table(["trainer", "property", "measured"], details))
    return "\n\n".join(parts)


def table_of(trainers: Sequence[str], columns: Sequence[str], judged: Judged) -> str:
    rows = []
    for name in trainers:
        trainer = TRAINERS[name]
        missing = " ".join(trainer.missing())
        promise = f"not installed: pip install {missing}" if missing else trainer.promise
        rows.append([name, promise, *(judged.get((name, one), Cell("–")).text for one in columns)])
    return table(["trainer", "promises", *columns], rows)


if __name__ == "__main__":
    arguments = arguments_of_this_lab()
    main(arguments.trainers, arguments.properties, arguments.store)
