"""Open a chapter or an assignment in JupyterLab, on this machine's loopback address.

    python -m labkit.book.notebook [NAME] [JUPYTERLAB'S OPTIONS…]

A reader runs and changes cells, and tests compare the stored outputs of a chapter. So JupyterLab
opens a copy, in the folder `notebooks`, which git ignores. JupyterLab knows no directive of the
book's: `plain` rewrites them. A copy that is there is opened as it is; delete it to start over.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import nbformat

from labkit.book.chapters import find, notebooks_of
from labkit.book.plain import make_plain
from labkit.launch.scripts import project_root

FIRST = "book/start/what_is_averaged.ipynb"
COPIES = "notebooks"
# What a chapter links to or imports, besides other chapters.
BESIDE = (".md", ".svg", ".png", ".py")


def place_of_copy(path: Path) -> Path:
    """Where the copy of `path` is, which is relative to the project's root, as the result is.

    It is as deep as `path`: a chapter that reads `../../labs` finds it from its copy, too.
    """
    return Path(COPIES, *path.parts[1:])


def copy_missing(root: Path) -> None:
    """Copy notebooks, and what the book has beside them, unless `notebooks` has it already."""
    found = (path for path in (root / "book").rglob("*.*") if path.suffix in BESIDE)
    unwanted = ("conftest.py", ".solutions.py")
    beside = [path.relative_to(root) for path in found if not path.name.endswith(unwanted)]
    for path in [*notebooks_of(root), *beside]:
        target = root / place_of_copy(path)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(f"{target.name}.unfinished")
            shutil.copyfile(root / path, unfinished)
            if path.suffix == ".ipynb" and path.parts[0] == "book":
                notebook = nbformat.read(unfinished, as_version=4)
                make_plain(notebook, root / path.parent)
                nbformat.write(notebook, unfinished)
            unfinished.replace(target)  # a part of a copy would be kept as the reader's own


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", default=FIRST, help=f"default: {FIRST}")
    options = sys.argv[1:]
    if options[:1] in (["-h"], ["--help"]):
        parser.parse_args(options)
    # argparse would take the value of an option of JupyterLab's for the name.
    name = options.pop(0) if options and not options[0].startswith("-") else FIRST
    try:
        root = project_root()
        copy = place_of_copy(find(name, root))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    copy_missing(root)
    print(f"Opening {copy}, a copy that you can change. Stop with Ctrl-C, twice.", flush=True)
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", "--log-level=WARN"]
    command += [f"--ServerApp.root_dir={root / COPIES}"]
    command += [f"--LabApp.default_url=/lab/tree/{copy.relative_to(COPIES).as_posix()}"]
    if os.geteuid() == 0:  # in a container
        command += ["--allow-root"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command += ["--LabApp.news_url=None", *options]
    # The kernel of this environment, also where the user has installed another "python3".
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "JUPYTER_PREFER_ENV_PATH": "1"}
    # In place of this process, so that no signal can end one and leave the other.
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
