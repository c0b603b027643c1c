"""Sockets that only processes of this user can use, on this machine, under a name.

On Linux the name is abstract: it exists as long as its socket does, so no file is left, however a
process ends. Both ends ask the kernel who the other one is. Elsewhere, the name is a file in a
folder that only its owner can enter.

The same user in another container is a stranger, too: root there, on this host's network, sees the
names of all sockets and can connect to them.
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
    """The next connection; None if it is gone, or comes from a process that `connect` refuses."""
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        try:
            _check_peer(connection)
        except OSError:
            connection.close()
        else:
            return connection
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
        _check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _name(address: str) -> str:
    return address.replace("@", "\0", 1) if address.startswith("@") else address


def _check_peer(connection: socket.socket) -> None:
    """Raise OSError unless the kernel says that the other end's process is this user's, here."""
    if not _ABSTRACT:  # who could open the file is this user
        return
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    process, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid() or _place(str(process)) != _place("self"):
        raise PermissionError(f"process {process}, which is connected, is not this user's, here")


def _place(process: str) -> tuple[str, ...]:
    """The control groups and namespaces of a process. Raises OSError if it cannot be seen here."""
    folder = Path("/proc", process)
    namespaces = (os.readlink(folder / "ns" / name) for name in _NAMESPACES)
    return (folder / "cgroup").read_text(), *namespaces
