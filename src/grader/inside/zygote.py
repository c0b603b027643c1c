"""The fork server inside the sandbox: torch is imported once, a rank costs a fork.

It runs no code of a student and receives none. For each connection of the trusted side it

1. takes one socket a rank, passed along as file descriptors, through which that rank will receive
   its job from the trusted side directly;
2. forks a *warden*, which leaves the namespaces of the fork server and forks the ranks, each again
   in namespaces of its own where they are routed and need no network;
3. the warden reports what stands between the ranks, then how each rank ended, and ends, with
   everything below it, when the connection of the trusted side is closed.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed

from grader.inside import walls
from grader.inside.rank import leave, run_rank

_MOST_RANKS = 16
_LISTENER = 3  # the file descriptor at which the listening socket is inherited
_LOOK_EVERY = 0.02  # seconds
_NOBODY = 65534


def serve(contained: bool) -> None:
    """Serve until the starter closes standard input. `contained`: inside bubblewrap."""
    if contained and os.getuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    walls.unreadable_by_others()
    walls.no_new_privileges()
    torch.set_num_threads(1)
    _warm_up()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=_LISTENER)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [], 0.5)
        _reap()
        if sys.stdin in readable:
            return
        if listener in readable:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _become(lambda connection=connection: _guard(connection, contained))
            connection.close()


def _warm_up() -> None:
    """Do once what torch does lazily, so that no rank pays for it. Starts no thread."""
    weight = torch.ones(2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    (torch.nn.functional.linear(torch.ones(2), weight) ** 2).sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(work) -> None:
    """Do `work` in this forked process and end it, whatever happens."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _guard(connection: socket.socket, contained: bool) -> None:
    """Between the fork server and the namespaces of one group of ranks."""
    walls.die_with_parent()
    request, sockets = _receive_request(connection)
    separated = walls.separate() if contained else False
    warden = os.fork()
    if warden == 0:
        _become(lambda: _ward(connection, request, sockets, separated))
    for own in sockets:
        own.close()
    connection.close()
    os.waitpid(warden, 0)


def _receive_request(connection: socket.socket) -> tuple[dict, list[socket.socket]]:
    room = socket.CMSG_LEN(_MOST_RANKS * array.array("i").itemsize)
    text, ancillary, _, _ = connection.recvmsg(4096, room)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return json.loads(text), [socket.socket(fileno=number) for number in descriptors]


def _ward(
    connection: socket.socket, request: dict, sockets: list[socket.socket], separated: bool
) -> None:
    """Start the ranks, report how each ends, end when the trusted side closes the connection."""
    walls.die_with_parent()
    os.setsid()
    below = walls.Below()
    folder = "/tmp"
    if separated:
        walls.raise_loopback()
        walls.own_folders("/tmp", "/dev/shm")
        if request["link"] != "routed":  # routed ranks still need it, to leave for their own
            walls.hide_processes()
    else:
        walls.adopt_orphans()
        folder = tempfile.mkdtemp(prefix="ranks-")
    ranks = {}
    walled, told = os.pipe()
    for rank, own in enumerate(sockets):
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(walled)
            for other in sockets:
                if other is not own:
                    other.close()
            place = f"{folder}/rank-{rank}"
            _become(lambda own=own, place=place: _cell(own, request, place, separated, told))
        ranks[pid] = rank
    for own in sockets:
        own.close()
    os.close(told)
    _tell(connection, {"isolation": _between(len(sockets), walled, separated)})
    while not select.select([connection], [], [], _LOOK_EVERY)[0]:
        pid, status = _next_ended()
        if pid in ranks:
            _tell(connection, {"rank": ranks.pop(pid), "status": status})
        if below.memory() > walls.OF_A_GROUP:
            _tell(connection, {"too much": "memory"})
            break
    if not separated:
        _kill(below)
        shutil.rmtree(folder, ignore_errors=True)
    # With namespaces the kernel ends everything below when this process, their first, ends.
    os._exit(0)


def _between(ranks: int, walled: int, separated: bool) -> str:
    """What stands between the ranks: the least that any of them has, by its own report."""
    reports = b"".join(iter(lambda: os.read(walled, ranks), b""))
    os.close(walled)
    if reports == b"1" * ranks:
        return "a namespace a rank"
    return "a namespace a group" if separated else "none"


def _next_ended() -> tuple[int, int]:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0
    return pid, os.waitstatus_to_exitcode(status) if pid else 0


def _tell(connection: socket.socket, message: dict) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _cell(own: socket.socket, request: dict, place: str, separated: bool, told: int) -> None:
    """A rank's own namespaces, folder and limits; then the rank. `told`: whether it has the first.

    No code of a student's runs before that is said.
    """
    walls.die_with_parent()
    alone = separated and request["link"] == "routed" and walls.separate()
    os.write(told, b"1" if alone else b"0")
    os.close(told)
    if alone:
        first = os.fork()
        if first == 0:
            # The first process of a namespace is spared most signals: the rank has to be another.
            walls.die_with_parent()
            _become(lambda: _start_and_mirror(own, request, place))
        own.close()
        _exit_like(os.waitpid(first, 0)[1])
    _prison(own, request, place, separated)


def _start_and_mirror(own: socket.socket, request: dict, place: str) -> None:
    walls.own_folders("/tmp", "/dev/shm")
    walls.hide_processes()
    child = os.fork()
    if child == 0:
        _become(lambda: _prison(own, request, place, True))
    own.close()
    while True:  # also reaps what the rank has orphaned
        pid, status = os.wait()
        if pid == child:
            _exit_like(status)


def _exit_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)  # as a shell says that a signal ended a process


def _prison(own: socket.socket, request: dict, place: str, contained: bool) -> None:
    os.setsid()
    os.makedirs(place)
    os.chdir(place)
    os.environ.clear()
    os.environ.update({"HOME": place, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"})
    quiet = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    walls.limit(request["seconds"], contained)
    walls.no_new_privileges()
    run_rank(own)
    leave()


def _kill(below: walls.Below) -> None:
    """Kill every process below; again, because one may fork meanwhile.

    Done once two looks in a row have found none: in one, a process may be missed whose parent ends
    just then.
    """
    empty = 0
    for _ in range(50):
        pids = below.pids()
        empty = 0 if pids else empty + 1
        if empty == 2:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)
