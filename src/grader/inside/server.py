"""The program in a sandbox: it starts ranks that run a student's code, and sends back their data.

Requests come in on standard input, answers leave on standard output: 8 bytes of length, then a
packed value. labkit's engine starts the ranks (`grader.inside.rank`), which communicate over gloo.
They are forks of this process, so a sandbox imports torch once. numpy imports its random part on
first use, so it is imported here, too.
"""

import contextlib
import importlib
import io
import linecache
import multiprocessing
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

from grader.inside.values import ValuesError, pack, unpack
from labkit.launch.fork_server import schedule_as_batch
from labkit.launch.guard import (
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    own_session,
)
from labkit.launch.memory import gather_memory, loading

with loading():
    import numpy.random  # noqa: F401

    from grader.inside.rank import StoppedError, draw, file_of, run
    from labkit.launch import ranks
    from labkit.launch.ranks import RanksError, RanksTimeoutError, run_ranks

_MIB = 2**20
_LIMITS = {
    "RLIMIT_CORE": 0,
    "RLIMIT_FSIZE": 64 * _MIB,  # of each file, so of each rank's output
    "RLIMIT_DATA": 2048 * _MIB,  # of each process
    "RLIMIT_NPROC": 256,  # processes and threads of the sandbox's user
}
_LONGEST = 300  # characters of a message
# A part of torch that takes a second to import, and what imports it on first use: it is imported
# here, once for all ranks.
_SLOW_PART = "torch._dynamo"
_SLOW = re.compile(
    r"optim|_functional_|compile|mesh|torch\.func|vmap|fsdp|DTensor|backward\([\w\[]"
)


def main(arguments: list[str]) -> None:
    """Serve until standard input ends. `arguments`: a user to become, or "0"."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    for stream in (requests, answers):
        os.set_inheritable(stream.fileno(), False)
    _contain(int(arguments[0]))
    gather_memory()
    schedule_as_batch()
    ranks.forked = _forks_of_this((requests.fileno(), answers.fileno()))
    _send(answers, {"ready": True})
    while (request := _receive(requests)) is not None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            answer = _answered(request)
        _send(answers, answer)


def _contain(user: int) -> None:
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        resource.setrlimit(resource.RLIMIT_NPROC, (_LIMITS["RLIMIT_NPROC"],) * 2)
    for name, most in _LIMITS.items():
        if name != "RLIMIT_NPROC":  # where the user is no other, it would count the user's others
            resource.setrlimit(getattr(resource, name), (most, most))


def _receive(stream: BinaryIO) -> Any:
    head = stream.read(8)
    return unpack(stream.read(int.from_bytes(head, "big"))) if len(head) == 8 else None


def _send(stream: BinaryIO, value: Any) -> None:
    data = pack(value)
    stream.write(len(data).to_bytes(8, "big") + data)
    stream.flush()


def _forks_of_this(kept: tuple[int, ...]) -> Callable[..., Any]:
    """The engine's `forked`, from this process, which has no threads. A fork closes `kept`."""

    server = os.getpid()

    def begin(target: Callable[..., None], theirs: Connection, *args: Any) -> None:
        die_with_parent(server)
        for descriptor in kept:
            os.close(descriptor)
        own_session()
        adopt_orphans()
        try:
            target(theirs, *args)
        finally:
            kill_descendants()

    @contextlib.contextmanager
    def forked(target: Callable[..., None], *args: Any, **_: Any) -> Iterator[Connection]:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=begin, args=(target, theirs, *args))
        process.start()
        theirs.close()
        try:
            yield ours
        finally:
            ours.close()
            process.join()

    return forked


def _answered(request: dict[str, Any]) -> dict[str, Any]:
    if request["call"] == "draw":
        try:
            [drawn] = run_ranks(draw, 1, request["draws"])
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:_LONGEST]}
        return {"drawn": unpack(drawn)}
    for name, source in request["cells"]:
        lines = source.splitlines(keepends=True)
        linecache.cache[file_of(name)] = (len(source), None, lines, file_of(name))
    if any(_SLOW.search(source) for _, source in request["cells"]):
        importlib.import_module(_SLOW_PART)
    try:
        world_size = len(request["givens"])
        packed = run_ranks(run, world_size, request, timeout=float(request["seconds"]))
        return {"ranks": [unpack(one) for one in packed]}
    except StoppedError as stopped:
        return {"stopped": stopped.about}
    except RanksTimeoutError as error:
        states = "; ".join(error.states)[: 3 * _LONGEST]
        states = states.replace("<cell> ", "")
        return {"stopped": {"how": "timeout", "states": states, "failed": {}}}
    except (RanksError, ValuesError) as error:
        states = str(error).splitlines()[0][:_LONGEST]
        return {"stopped": {"how": "ended", "states": states, "failed": {}}}


if __name__ == "__main__":
    main(sys.argv[1:])
