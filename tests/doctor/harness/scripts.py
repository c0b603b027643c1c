"""The scripts of the corpus: whole files, and variants that differ from one by a few lines.

The README describes both formats.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

STORED = Path(__file__).resolve().parents[1] / "scripts"
CORPUS = Path(__file__).resolve().parents[3] / "surveys/doctor/corpus"
FIELDS = re.compile(r"(\w+)=(\S+)")
TITLE = re.compile(r"^=== (\w+)(.*)$", re.MULTILINE)
REQUIRED = {"expect", "ranks", "launch"}


@dataclass(frozen=True)
class Script:
    """A training script and what its first line expects of the doctor."""

    name: str
    text: str
    expected: frozenset[str]
    ranks: int
    launch: str

    @classmethod
    def of(cls, name: str, text: str) -> Self:
        """Raises ValueError if the first line is not a header."""
        first = text.split("\n", 1)[0]
        fields = dict(FIELDS.findall(first))
        if not first.startswith("# doctor: ") or fields.keys() != REQUIRED:
            raise ValueError(f"{name}: the first line is not a header of the corpus: {first!r}")
        codes = () if fields["expect"] == "none" else fields["expect"].split(",")
        return cls(name, text, frozenset(codes), int(fields["ranks"]), fields["launch"])

    @property
    def broken(self) -> bool:
        return bool(self.expected)


@dataclass(frozen=True)
class Stored:
    """A script of `tests/doctor/scripts`: what it is found to be, and a part of the reason."""

    script: Script
    verdict: str
    why: str

    @classmethod
    def of(cls, name: str, **replaced: str) -> Self:
        """By its name. `old=new`: with other words in it, which have to be there."""
        first, body = (STORED / f"{name}.py").read_text().split("\n", 1)
        start = (STORED / "start.py").read_text()
        head, _ = start.split("\n# A wrapped model", 1)
        before = "" if "(whole)" in first else head if "(head only)" in first else start
        text = f"{before}\n{body}"
        for old, new in replaced.items():
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        launch = "spawn" if "(whole)" in first else "torchrun"
        header = f"# doctor: expect=none ranks=2 launch={launch}"
        verdict, _, why = re.sub(r" \((whole|head only)\)", "", first[2:]).partition(": ")
        return cls(Script.of("train", f"{header}\n{text}"), verdict, why)


def corpus(folder: Path = CORPUS) -> list[Script]:
    """All scripts: each file, and after it its variants."""
    found = []
    for path in sorted(folder.glob("*.py")):
        found.append(Script.of(path.stem, path.read_text()))
        changes = path.with_suffix(".variants")
        if changes.exists():
            found += variants(path.read_text(), changes.read_text(), changes.name)
    return found


def variants(base: str, changes: str, where: str) -> list[Script]:
    """The scripts that `changes`, the text of the file `where`, makes of `base`."""
    _, *parts = TITLE.split(changes)
    found = []
    for name, said, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        header, measured, *rest = base.split("\n")
        notes = [line for line in body.split("\n") if line.startswith("#")]
        fields = dict(FIELDS.findall(header)) | dict(FIELDS.findall(said))
        header = "# doctor: " + " ".join(f"{key}={value}" for key, value in fields.items())
        hunks = [line for line in body.split("\n") if not line.startswith("#")]
        changed = _changed(rest, "\n".join(hunks), f"{where}, variant {name}")
        found.append(Script.of(name, "\n".join([header, *(notes or [measured]), *changed])))
    return found


def _changed(lines: list[str], hunks: str, where: str) -> list[str]:
    """`lines` after all hunks. Hunks are separated by blank lines and name disjoint places."""
    changes = []
    for hunk in re.split(r"\n(?:\s*\n)+", hunks.strip("\n")):
        if not hunk:
            continue
        marked = hunk.split("\n")
        if wrong := [line for line in marked if line[:1] not in ("-", "+", " ")]:
            raise ValueError(f"{where}: a line starts with none of '-', '+', ' ': {wrong[0]!r}")
        old = [line[1:] for line in marked if line[0] != "+"]
        new = [line[1:] for line in marked if line[0] != "-"]
        starts = range(len(lines) - len(old) + 1)
        at = [start for start in starts if lines[start : start + len(old)] == old]
        if len(at) != 1 or not old:
            sought = "\n".join(old)
            raise ValueError(f"{where}: the base has this {len(at)} times, not once:\n{sought}")
        changes.append((at[0], old, new))
    for start, old, new in sorted(changes, reverse=True):
        lines = lines[:start] + new + lines[start + len(old) :]
    return lines
