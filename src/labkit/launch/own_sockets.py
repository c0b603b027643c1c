"""Sockets that only processes of this user can use, on this machine, under a name.

On Linux the name is abstract: it exists as long as its socket does, so no file is left, however a
process ends. Both ends ask the kernel who the other one is. Elsewhere, the name is a file in a
folder that only its owner can enter.
"""

import contextlib
import os
import shutil
import socket
import struct
import sys
import tempfile
import uuid
from pathlib import Path

_ABSTRACT = sys.platform.startswith("linux")
_WAITING = 4096  # connections that may wait to be accepted
_NAMESPACES = ("mnt", "net", "pid", "user")


def new_address() -> str:
    """A name that no other socket has; `remove` it in the end."""
    name = f"labkit-{uuid.uuid4().hex}"
    return f"@{name}" if _ABSTRACT else tempfile.mkdtemp(prefix="labkit-") + "/socket"


def remove(address: str) -> None:
    """Remove the file of an address, with those of addresses that extend it, if it has one."""
    if not address.startswith("@"):
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def listen(address: str) -> socket.socket:
    """Listen at `address`. Raises OSError if another process does."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_name(address))
        listener.listen(_WAITING)
    except BaseException:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection; None if it is gone, or comes from another user's process."""
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        if not _ABSTRACT or _peer(connection)[1] == os.geteuid():
            return connection
        connection.close()
    return None


def connect(address: str) -> socket.socket:
    """Connect to the process that listens at `address`.

    Raises OSError if there is none, PermissionError if it is another user's, or if it is in another
    container, namespace, or control group: what it starts would not be here.
    """
    if not address.startswith("@") and Path(address).parent.stat().st_uid != os.geteuid():
        raise PermissionError(f"{address} is not a socket of this user")
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_name(address))
        if _ABSTRACT:
            process, user = _peer(connection)
            if user != os.geteuid() or _place(str(process)) != _place("self"):
                raise PermissionError(f"process {process}, at {address}, is not this user's, here")
    except BaseException:
        connection.close()
        raise
    return connection


def _name(address: str) -> str:
    return address.replace("@", "\0", 1) if address.startswith("@") else address


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end of a connection, and its user, as the kernel noted them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    process, user, _ = struct.unpack("3i", credentials)
    return process, user


def _place(process: str) -> tuple[str, ...]:
    """The control groups and namespaces of a process. Raises OSError if it cannot be seen here."""
    folder = Path("/proc", process)
    namespaces = (os.readlink(folder / "ns" / name) for name in _NAMESPACES)
    return (folder / "cgroup").read_text(), *namespaces
