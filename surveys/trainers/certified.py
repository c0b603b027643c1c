"""Measure the trainers a second time: by a certificate of the same adapters.

    python -m surveys.trainers.certified [TRAINER …]    # certify, store, print on the page

The suite compares a trainer's gradient with that of its promise. The certificate knows no promise:
it compares the ranks of a script with one process of the same script (`as_script`). Both run in
the same setting.
"""

import argparse
import datetime
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ddp_doctor
from surveys.trainers.stored import CERTIFIED, PAGE, as_json, rows
from surveys.trainers.trainers import TRAINERS, version

ROOT = Path(__file__).resolve().parents[2]
START = "% The next lines are written by surveys/trainers/certified.py.\n"
END = "% Until here, by certified.py.\n"
# The cells that have the certificate's setting, or W for a trainer that has none of these.
COMPARED = "WxK", "order", "W=2", "mixed"
SCRIPT = Path(__file__).with_name("as_script.py")
AT_A_TIME = 2
Row = Mapping[str, Any]


def certified(name: str) -> dict[str, Any]:
    """The row of one trainer."""
    certificate = ddp_doctor.certify(SCRIPT, name, ranks=2)
    return {
        "trainer": name,
        "date": datetime.date.today().isoformat(),
        "versions": {one: version(one) for one in ("torch", *TRAINERS[name].needs)},
        "verdict": certificate.verdict,
        "why": certificate.why.replace(f"{ROOT}/", ""),
        "ratio": certificate.ratio,
        "cosine": certificate.cosine,
        "factor": certificate.factor,
        "properties": {one.name: one.verdict for one in certificate.properties},
    }


def stored() -> dict[str, Row]:
    return {row["trainer"]: row for row in rows(CERTIFIED)}


def store(row: Row) -> None:
    """Replace one row, and print the page's table; both keep the order of the trainers."""
    known = stored() | {row["trainer"]: row}
    CERTIFIED.write_text(as_json([dict(known[name]) for name in TRAINERS if name in known]))
    write_page()


def write_page() -> None:
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + printed() + END + rest.split(END)[1])


def printed() -> str:
    """How many agree; what the certificate says of those that do not, or were not judged."""
    known, cells = stored(), {row["trainer"]: row["cells"] for row in rows()}
    agreeing = {name: agree(name, cells[name], row) for name, row in known.items()}
    notes: dict[str, list[str]] = {}  # what is said: of which trainers
    for name, row in known.items():
        if agreeing[name] != "agree":
            said = f"{agreeing[name]}. “{row['why']}”"
            notes.setdefault(said, []).append(f"**{name}**")
    counts = (list(agreeing.values()).count(one) for one in ("agree", "disagree", "not judged"))
    counted = "{} of {} trainers were certified: {} agree, {} disagree, {} are not judged.".format(
        len(known), len(TRAINERS), *counts
    )
    left = ", ".join(name for name in TRAINERS if name not in known)
    lines = [counted + (f" No certificate: {left}." if left else "")]
    if notes:
        lines += ["", "What the doctor says is in quotation marks."]
        lines += ["", *(f"- {', '.join(names)}: {said}" for said, names in notes.items())]
    return "\n".join([*lines, ""])


def agree(name: str, cells: Row, row: Row) -> str:
    """Whether the suite's cells in the certificate's setting say the same: equal, or not."""
    if row["verdict"] == "not judged":
        return "not judged"
    names = [one for one in COMPARED if TRAINERS[name].has(one)] or ["W"]
    equal = all(cells[one]["text"] == "equal" for one in names)
    return "agree" if equal == (row["verdict"] == "equal") else "disagree"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = [name for name, trainer in TRAINERS.items() if not trainer.missing()]
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", help=f"default: {' '.join(here)}")
    names = parser.parse_args().trainers or here
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    os.environ["PYTHONPATH"] = str(ROOT)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for row in pool.map(certified, names):
            store(row)
            print(f"{row['trainer']}: {row['verdict'].upper()}. {row['why']}", flush=True)


if __name__ == "__main__":
    main()
