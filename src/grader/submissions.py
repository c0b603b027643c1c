"""The notebooks of a folder, each with the student who handed it in, and what is odd about them.

Moodle's and Canvas's downloads carry the student's name and number in the names of files and
folders; both are told apart here.
"""

import contextlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# "Ada Lovelace_123456_assignsubmission_file" (Moodle: a folder, or the start of a file's name).
_MOODLE = re.compile(r"^(?P<name>.+?)_(?P<id>\d+)_assignsubmission_[a-z]+_?")
# "lovelaceada_LATE_12345_678901_average_gradients-2" (Canvas: a file's name).
_CANVAS = re.compile(r"^(?P<name>[^_\W]+)(?P<late>_LATE)?_(?P<id>\d+)_\d+_.+")
_LONGEST_NAME = 100
_MOST_FILES = 20_000  # that one folder may hold


@dataclass(frozen=True)
class Work:
    """One student's work, as it was found."""

    student: str
    path: Path
    id: str = ""  # the course system's number
    warning: str = ""  # what is odd about the place or the format


def find_submissions(paths: Iterable[Path], assignment: str = "") -> dict[str, Work]:
    """What each student handed in, by name. A folder stands for what is in it.

    nbgrader collects into STUDENT/ASSIGNMENT/NOTEBOOK: of the notebooks further down, one that is
    called `assignment`, or whose folder is, is in the right place.

    A notebook is called after its file; in a folder of its own, after that folder, and after both
    where the folder holds several. Of notebooks that are named one by one, those that share a name
    are called after their folders. A file that is no notebook, and a notebook further down, get a
    warning, unless the student has a notebook in the right place. What begins with a dot is an
    editor's or a system's: skipped. Links are not followed. Raises FileNotFoundError for a path
    that does not exist.
    """
    paths = list(paths)
    for path in paths:
        if not path.exists() and not path.is_symlink():
            raise FileNotFoundError(
                f"there is no {path.absolute()}; pass notebooks, or the folder that holds them"
            )
    found = [one for path in paths if path.is_dir() for one in _in_folder(path, assignment)]
    alone = [path for path in paths if not path.is_dir()]
    counts = Counter(file.stem for file in alone)
    found += [
        Work(file.stem if counts[file.stem] == 1 else file.absolute().parent.name, file)
        for file in alone
    ]
    named: dict[str, Work] = {}
    for one in found:
        one = _split(one)
        name = one.student
        while name in named:
            name += "_"
        named[name] = Work(name, one.path, one.id, one.warning)
    return named


def _in_folder(top: Path, assignment: str) -> list[Work]:
    """What each student has in `top`: a file there, or a folder with files."""
    files, folders = _visible(top)
    notebooks = [Work(file.stem, file) for file in files if file.suffix == ".ipynb"]
    students = {_split(one).student for one in notebooks}
    others = [
        Work(file.stem, file, warning=f"{file.name} is not a notebook")
        for file in files
        if file.suffix not in (".ipynb", ".csv")
    ]
    odd = [one for one in others if _split(one).student not in students]
    return notebooks + odd + [one for folder in folders for one in _of_student(folder, assignment)]


def _of_student(folder: Path, assignment: str) -> list[Work]:
    if folder.is_symlink():
        return [Work(folder.name, folder, warning=f"{folder.name} is a link: not followed")]
    if folder.suffix == ".ipynb":
        return [Work(folder.stem, folder, warning=f"{folder.name} is a folder, not a notebook")]
    files, folders = _visible(folder)
    notebooks = [file for file in files if file.suffix == ".ipynb"]
    if len(notebooks) == 1:
        return [Work(folder.name, notebooks[0])]
    if notebooks:
        return [Work(f"{folder.name} {file.stem}", file) for file in notebooks]
    below = [path.relative_to(folder) for path in sorted(folder.rglob("*.ipynb"))]
    deeper = [path for path in below if not any(part.startswith(".") for part in path.parts)]
    named = [path for path in deeper if assignment in (path.stem, path.parent.name)]
    if len(named) == 1:
        return [Work(folder.name, folder / named[0])]
    if len(deeper) == 1:
        where = f"the notebook was found in {deeper[0].parent}"
        return [Work(folder.name, folder / deeper[0], warning=where)]
    there = ", ".join(path.name for path in [*files, *folders][:5]) or "empty"
    odd = f"{len(deeper)} notebooks in folders below: none was graded"
    return [
        Work(folder.name, folder, warning=odd if deeper else f"no notebook in the folder: {there}")
    ]


def _visible(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files, links and whatever else is there; folders, and links to them."""
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    inside = inside[:_MOST_FILES]
    return [one for one in inside if not one.is_dir()], [one for one in inside if one.is_dir()]


def _split(one: Work) -> Work:
    """With the student's name and number apart, where a course system has joined them."""
    for pattern in (_MOODLE, _CANVAS):
        found = pattern.match(one.student)
        if found:
            warning = "late, says the course system" if found.groupdict().get("late") else ""
            warning = legible_name(one.warning) or warning
            return Work(legible_name(found["name"]), one.path, found["id"], warning)
    return Work(legible_name(one.student), one.path, warning=legible_name(one.warning))


def legible_name(name: str) -> str:
    """`name` without what no file, page or terminal can show, and not longer than a line.

    A C locale hands out the bytes of a file's name one by one; here they are letters again.
    """
    with contextlib.suppress(UnicodeEncodeError):  # letters already
        name = os.fsencode(name).decode("utf-8", "replace").replace("\ufffd", "?")
    name = unicodedata.normalize("NFC", name.encode("utf-8", "replace").decode())
    name = "".join(c if c.isprintable() else "?" for c in name)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
