"""The fork server inside the sandbox: torch is imported once, a rank costs a fork.

It runs no code of a student and receives none. For each connection of the trusted side it

1. takes one socket per rank, passed along as file descriptors, through which that rank will receive
   its job from the trusted side directly;
2. forks a *warden* in a process namespace of its own, which forks the ranks, each again in
   namespaces of its own where they are routed and need no network;
3. the warden reports what stands between the ranks, then how each rank ended and for how long none
   of them has done anything, and ends, with everything below it, when the connection is closed.
"""

import array
import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
import traceback

import torch
import torch.distributed
import torch.distributed._functional_collectives
import torch.distributed.device_mesh

from grader.inside import walls
from grader.inside.large_pages import gather_memory
from grader.inside.rank import leave, run_rank

_MOST_RANKS = 16
_LOOK_EVERY = 0.25  # seconds between two looks at memory and processor time
_ASLEEP = 0.02  # seconds of processor time between two looks: with less a group does nothing
_NOBODY = 65534


def serve(contained: bool, listener: int) -> None:
    """Serve until the starter closes standard input. `contained`: inside bubblewrap.

    `listener` is the descriptor of the listening socket, which is inherited.
    """
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
    gc.enable()  # off since the start, see grader.sandbox
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    separated = contained and walls.become_warden_of_wardens()
    if separated:
        # Its own process namespace begins with a child; this process only waits for it.
        child = os.fork()
        if child:
            os.close(listener)
            os.close(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        walls.die_with_parent()
    gather_memory()
    _listen(socket.socket(fileno=listener), separated)


def _listen(listener: socket.socket, separated: bool) -> None:
    nursery = walls.Nursery() if separated else None
    listener.listen(64)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, 0], [], [], 0.5)
        _reap()
        if 0 in readable:
            return
        if listener in readable:
            connection, _ = listener.accept()
            if (nursery.fork() if nursery else os.fork()) == 0:
                listener.close()
                _become(lambda connection=connection: _ward(connection, separated))
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
    """Do `work` in this forked process and end it, whatever happens.

    A connection that the trusted side has closed meanwhile is no news: a check was stopped.
    """
    try:
        work()
    except (BrokenPipeError, ConnectionResetError):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _receive_request(connection: socket.socket) -> tuple[dict, list[socket.socket]]:
    room = socket.CMSG_LEN(_MOST_RANKS * array.array("i").itemsize)
    text, ancillary, _, _ = connection.recvmsg(4096, room)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return json.loads(text or b"{}"), [socket.socket(fileno=number) for number in descriptors]


def _ward(connection: socket.socket, separated: bool) -> None:
    """Start the ranks, report how each ends, end when the trusted side closes the connection."""
    walls.die_with_parent()
    request, sockets = _receive_request(connection)
    if not sockets:
        os._exit(0)
    os.setsid()
    below = walls.Below()
    routed = request["link"] == "routed"
    folder, nursery = "/tmp", None
    if separated:
        nursery = walls.Nursery() if routed else None
        if not routed:  # one network and one /tmp for them all
            walls.separate()
            walls.raise_loopback()
            walls.own_folders("/tmp", "/dev/shm", "/dev/pts")
    else:
        walls.adopt_orphans()
        folder = tempfile.mkdtemp(prefix="ranks-")
    ranks = {}
    walled, told = os.pipe()
    for rank, own in enumerate(sockets):
        pid = nursery.fork() if nursery else os.fork()
        if pid == 0:
            os.close(walled)
            place = f"{folder}/rank-{rank}"
            alone = nursery is not None
            _become(
                lambda own=own, place=place, alone=alone: _cell(
                    own, request, place, separated, alone, told
                )
            )
        ranks[pid] = rank
    for own in sockets:
        own.close()
    os.close(told)
    between = _between(len(sockets), walled, separated)
    _tell(connection, {"isolation": between})
    _watch(connection, ranks, below)
    if not separated:
        _kill(below)
        shutil.rmtree(folder, ignore_errors=True)
    # With namespaces the kernel ends everything below when this process, their first, ends.
    os._exit(0)


def _watch(connection: socket.socket, ranks: dict[int, int], below: walls.Below) -> None:
    """Report what becomes of the ranks until the trusted side closes the connection."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    busy_until, used, look_at = time.monotonic(), 0.0, 0.0
    while True:
        while (found := _next_ended())[0]:
            pid, status = found
            if pid in ranks:
                _tell(connection, {"rank": ranks.pop(pid), "status": status})
        now = time.monotonic()
        if below.known and now >= look_at:
            look_at = now + _LOOK_EVERY
            pids = below.pids()
            seconds = below.seconds(pids)
            if abs(seconds - used) > _ASLEEP:
                used, busy_until = seconds, now
            _tell(connection, {"idle": round(now - busy_until, 1)})
            if below.memory(pids) > walls.OF_A_GROUP:
                _tell(connection, {"too much": "memory"})
                return
        readable = select.select([connection, ended], [], [], max(0.0, look_at - now))[0]
        if ended in readable:
            os.read(ended, 4096)
        if connection in readable:
            return


def _between(ranks: int, walled: int, separated: bool) -> str:
    """What stands between the ranks: the least that any of them has, by its own report."""
    reports = b"".join(iter(lambda: os.read(walled, ranks), b""))
    os.close(walled)
    if reports == b"1" * ranks:
        return "a namespace per rank"
    return "a namespace per group" if separated else "none"


def _next_ended() -> tuple[int, int]:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0
    return pid, os.waitstatus_to_exitcode(status) if pid else 0


def _tell(connection: socket.socket, message: dict) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _cell(
    own: socket.socket, request: dict, place: str, separated: bool, alone: bool, told: int
) -> None:
    """A rank's own namespaces, folder and limits; then the rank. `told`: whether it has the first.

    No code of a student's runs before that is said.
    """
    walls.die_with_parent()
    if separated:
        walls.separate(network=alone)
    if alone:
        walls.own_folders("/tmp", "/dev/shm", "/dev/pts")
    if separated:
        walls.hide_processes()
    os.write(told, b"1" if alone else b"0")
    os.setsid()
    os.makedirs(place)
    os.chdir(place)
    os.environ.clear()
    os.environ.update({"HOME": place, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"})
    quiet = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    walls.close_all_but(own.fileno())
    # The first process of a namespace is spared the signals that it does not handle.
    signal.signal(signal.SIGXCPU, lambda *_: os._exit(128 + signal.SIGXCPU))
    walls.limit(request["seconds"], walls.PROCESSES if separated else None)
    walls.no_new_privileges()
    if separated:
        walls.own_keyring()
        walls.drop_capabilities()
        walls.unreadable_by_others()
        walls.forbid(locks=alone)
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
