"""The program in a bubblewrap: it starts ranks that run students' code, and sends back their data.

1. `main` imports torch once and then only forks: one server per submission.
2. That server stands behind walls of its own (`grader.inside.walls`) and answers requests. A
   message is 8 bytes of length, then a packed value.
3. For each check and number of ranks it forks a supervisor, which forks the ranks
   (`grader.inside.rank`); these communicate over gloo. The server ends all processes that the ranks
   have left, and hands on their answer unread.

Every check therefore runs in processes that have imported everything and have executed nothing of
the student's. What a solution changes in its process (functions of torch, defaults, hooks, threads,
the environment) ends with the check, by construction: a change that were missed would earn or cost
points. The forks and the rendezvous are half of the processor time of a small check.
"""

import contextlib
import functools
import io
import linecache
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any, NoReturn

from grader.inside import walls
from grader.inside.values import LARGEST, ValuesError, pack, unpack
from labkit.launch.fork_server import schedule_as_batch
from labkit.launch.guard import adopt_orphans, die_with_parent, kill_descendants
from labkit.launch.memory import gc_paused, use_huge_pages

with gc_paused():
    # Otherwise each fork would import these on first use, the last for a second.
    import multiprocessing.popen_fork  # noqa: F401

    import numpy.random  # noqa: F401
    import torch._dynamo  # noqa: F401

    from grader.inside.rank import LONGEST, RankFailedError, draw, file_of, run
    from labkit.launch import ranks
    from labkit.launch.ranks import RanksError, RanksTimeoutError, run_ranks

_STUCK = 4.0  # seconds after which ranks that wait for each other are ended
_JOINING = 5  # seconds for the ranks' start, beyond a request's own limit


def main(arguments: list[str]) -> NoReturn:
    """Fork for each connection that comes through a socket, until that closes.

    `arguments`: the number of the socket, and "walled" or "trusted".
    """
    connections, walled = socket.socket(fileno=int(arguments[0])), arguments[1] == "walled"
    use_huge_pages()
    schedule_as_batch()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forks
    server = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connections, 1, 1)
        if not message:
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as link, contextlib.suppress(OSError):
            if os.fork() == 0:
                connections.close()
                try:
                    _serve(link, walled, server)
                finally:
                    os._exit(0)


def _serve(link: socket.socket, walled: bool, server: int) -> None:
    """Be the server of one submission, until the other end of `link` is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    link.set_inheritable(False)
    outside = os.getpid()  # everything of this submission is below this process
    walls.limit()
    if walled:
        die_with_parent(server)
        try:
            walls.enter()
        except OSError as error:
            _send(link, pack({"failed": str(error)}))
            return
    adopt_orphans()
    os.register_at_fork(after_in_child=link.close)
    _send(link, pack({"ready": outside}))
    while data := _receive(link):
        answer = _answer_of_a_fork(unpack(data), link)
        kill_descendants()
        if walled:
            walls.empty_temporary()
        _send(link, answer)


def _receive(link: socket.socket) -> bytes:
    """The next message; empty if none comes, or one that is too large."""
    size = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "big")
    return link.recv(size, socket.MSG_WAITALL) if size <= LARGEST else b""


def _send(link: socket.socket, data: bytes) -> None:
    link.sendall(len(data).to_bytes(8, "big") + data)


def _answer_of_a_fork(request: dict[str, Any], link: socket.socket) -> bytes:
    """The answer, from a process for this request alone: it unpickles what the ranks send.

    This process only hands it on. Ends if `link` is closed meanwhile. A fork that is silent, or
    was stopped by a student's process, costs no more than the request's own limit.
    """
    server, (ours, theirs) = os.getpid(), socket.socketpair()
    with ours:
        with theirs:
            if os.fork() == 0:
                try:
                    ours.close()
                    walls.let_own_user_look()
                    die_with_parent(server)
                    _answer(request, theirs)
                finally:
                    os._exit(0)
        signal.signal(signal.SIGALRM, _too_late)
        signal.alarm(math.ceil(request["seconds"]) + _JOINING)
        try:
            if link in wait([link, ours]):  # no request comes before the answer
                kill_descendants()
                os._exit(0)
            answer = _receive(ours)
        except TimeoutError:
            late = "it took too long: the process that watches its ranks gave no answer"
            return pack(_stopped("too long", late))
        finally:
            signal.alarm(0)
        return answer or pack(_stopped("ended", "its processes were ended from within"))


def _too_late(*_: object) -> NoReturn:
    raise TimeoutError


def _answer(request: dict[str, Any], link: socket.socket) -> None:
    os.register_at_fork(after_in_child=link.close)
    ranks.forked = functools.partial(_supervised_here, link)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        answer = pack(_answered(request))
    _send(link, answer)


@contextlib.contextmanager
def _supervised_here(
    link: socket.socket, supervise: Callable[..., None], *args: Any
) -> Iterator[SimpleNamespace]:
    """The engine's `forked`, without a fork: this process is one already."""
    outcomes: list[Any] = []
    caller = SimpleNamespace(fileno=link.fileno, send=outcomes.append, recv=outcomes.pop)
    supervise(caller, *args)
    yield caller


def _answered(request: dict[str, Any]) -> dict[str, Any]:
    if request["call"] == "draw":
        try:
            return {"drawn": draw(request["draws"])}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:LONGEST]}
    for name, source in request["cells"]:
        lines = source.splitlines(keepends=True)
        linecache.cache[file_of(name)] = (len(source), None, lines, file_of(name))
    try:
        world_size = len(request["givens"])
        limits = {"timeout": float(request["seconds"]), "stuck_after": _STUCK}
        packed = run_ranks(run, world_size, request, **limits)
        return {"ranks": [unpack(one) for one in packed]}
    except RankFailedError as stopped:
        return {"stopped": stopped.about}
    except RanksTimeoutError as error:
        states = "; ".join(error.states)[: 3 * LONGEST]
        return _stopped("timeout", states.replace("<cell> ", ""))
    except (RanksError, ValuesError) as error:
        return _stopped("ended", str(error).splitlines()[0][:LONGEST])


def _stopped(how: str, states: str) -> dict[str, Any]:
    return {"stopped": {"how": how, "states": states, "failed": {}}}


if __name__ == "__main__":
    main(sys.argv[1:])
