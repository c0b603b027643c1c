"""Folders that processes find by name; some lie in a place where other users write, too."""

import os
import stat
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "site"  # its sitecustomize starts the doctor


def own_folder(path: Path) -> Path:
    """Make a folder that only this user can read and write, or take it if it is there already.

    Raises PermissionError if what is there is a link, belongs to another user, or is open to one:
    then what lies in it may not come from this run.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        problem = "is a link"
    elif found.st_uid != os.getuid():
        problem = "belongs to another user"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = "is open to other users"
    else:
        return path
    raise PermissionError(f"{path} {problem}")
