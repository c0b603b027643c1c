"""Ranks in a notebook: `run_ranks(fn, 4)` calls `fn` in four new processes.

    def work(rank, world_size, device, scale):
        x = torch.full((2,), float(rank), device=device)
        dist.all_reduce(x)
        return x * scale

    run_ranks(work, 4, 10.0)  # a list of four tensors, in rank order

The function may be written in a notebook cell. Parameters named `rank`, `world_size`, and `device`
are filled by name; `args` fills all others in order. The default process group is initialized when
the function is called.

1. This module checks the call and pickles the function with cloudpickle.
2. A supervisor is forked from a server that has loaded torch (`labkit.launch.forks`). It forks the
   ranks, and watches them and the caller (`labkit.launch.supervisor`).
3. This module prints the ranks' output in rank order. It returns the results, or raises the first
   failure together with the state of every other rank (`labkit.launch.rank_states`).

A call with four ranks takes about 0.1 s on two cores; the first one takes one to two seconds more.
Every rank is a new process with one thread and newly seeded random number generators (torch,
Python, numpy), so a chapter that needs equal numbers on all ranks must set a seed. Unlike
torchrun's ranks, these share one seed of string hashes, and therefore one order of sets.

Only gloo listens, on the loopback interface and on ports that the system chooses. No process is
left behind, even if the caller is killed (`labkit.launch.guard`). Tested on Linux; macOS takes the
same path without the Linux system calls. On Windows, use WSL.
"""

import contextlib
import contextvars
import functools
import inspect
import linecache
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NoReturn

import cloudpickle

from labkit.launch.forks import NotStartedError, forked
from labkit.launch.lab import choose_devices
from labkit.launch.memory import check_memory
from labkit.launch.nodes import LOOPBACK
from labkit.launch.rank_states import STARTING, is_readers_code
from labkit.launch.supervisor import (
    INJECTED,
    JOIN_WITHIN,
    SECONDARY_ERROR,
    Job,
    Outcome,
    Report,
    bind,
    rebuild_exception,
    supervise,
)

# The supervisor imports modules of these packages before it forks: importing them starts no thread.
_OWN = ("labkit", "miniddp")
# Threads take turns in pickling: cloudpickle has one registry for the whole process.
_SHIPPING = threading.Lock()
# Of failures within this many seconds the lowest rank's counts as the first, so that an error which
# every rank raises is reported from the same rank at every run.
_SAME_MOMENT = 0.25
# What c10d and gloo write by themselves: time-stamped, or in an order that varies.
_NOISE = re.compile(r"^(\[rank\d+\]:)?\[?[EWI]\d{4} \d\d:\d\d:\d\d|^\[Gloo\] Rank \d+ is connected")


_STUCK_AFTER = contextvars.ContextVar[float | None]("_STUCK_AFTER", default=None)


class RanksError(RuntimeError):
    """A rank ended without an exception of its own, or the call could not be sent to the ranks.

    `states` holds one line per rank, in rank order.
    """

    def __init__(self, message: str, states: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.states = states

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.states)

    def _render_traceback_(self) -> list[str]:
        # Asked for by IPython: one block, without the frames of this package.
        return [f"{type(self).__name__}: {self}"]


class RanksTimeoutError(RanksError, TimeoutError):
    """At least one rank did not return in time; every rank has been stopped."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    stuck_after: float | None = None,
    device: str = "auto",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn` on `world_size` new ranks and return their results in rank order.

    Args:
        fn: any function that cloudpickle can pickle, including one from a notebook cell. Parameters
            named `rank` (int), `world_size` (int), and `device` (torch.device) are filled by name.
        world_size: the number of ranks, at least 1.
        args: values for the other parameters of `fn`, in order, the same on every rank.
        timeout: seconds for the function, counted from the moment when all ranks have joined the
            process group. Joining may take as long, but at least 30 s.
        stuck_after: end the call, like a timeout, once all unfinished ranks wait for each other on
            the CPU and none has moved for so many seconds (`labkit.launch.rank_states`; Linux).
            None: only `timeout` ends it, or what `ends_when_stuck` says. A rank that catches a time
            limit of its own, such as that of `Work.wait`, needs more.
        device: "auto" takes NCCL and `cuda:rank` if there are `world_size` GPUs, and otherwise gloo
            on the CPU. "cpu" always takes the CPU. "cuda" requires GPUs; ranks share them, over
            gloo, if there are fewer than `world_size`.
        env: environment variables for the ranks, added to the caller's.

    Raises:
        ValueError, TypeError: `world_size`, a time, `device`, `env`, or the arguments are not
            valid, or the memory does not hold so many ranks (`labkit.launch.memory.check_memory`).
        the rank's own exception: the first one that a rank raised. Its notes hold that rank's
            traceback and the state of the other ranks.
        RanksTimeoutError: the time is up, for joining or for the function, or the ranks are stuck.
            The text says for each rank whether it finished, or in which collective it waits and at
            which line of the caller's code.
        RanksError: a rank called sys.exit or os._exit or was killed, its result cannot be sent
            back, or `fn` cannot be pickled.

    The ranks' output is printed after all ranks have ended, in rank order; each line begins with
    `[rank r]`. Results are pickled: a parameter loses its gradient, and a view takes its whole
    storage with it (return a clone).
    """
    stuck_after = _STUCK_AFTER.get() if stuck_after is None else stuck_after
    _check(fn, world_size, args, timeout=timeout, stuck_after=stuck_after)
    check_memory(world_size)
    devices, backend = choose_devices(world_size, device, "device")
    payload, code = _ship(fn, args), getattr(_innermost(fn), "__code__", None)
    job = Job(
        payload=payload,
        home=code.co_filename if code else "",
        devices=devices,
        backend=backend,
        timeout=float(timeout),
        environment=_environment(env),
        cells=_cells(),
        modules=_own_modules(payload),
        stuck_after=stuck_after,
    )
    outcome = _supervised(job)
    for rank, (stdout, stderr) in enumerate(outcome.outputs):
        _show(rank, stdout, sys.stdout)
        _show(rank, stderr, sys.stderr)
    if any(report.status != "returned" for report in outcome.reports):
        _raise_first_failure(outcome, job)
    return [_receive(rank, report) for rank, report in enumerate(outcome.reports)]


@contextlib.contextmanager
def ends_when_stuck(seconds: float) -> Iterator[None]:
    """Within this context, `stuck_after` of `run_ranks` is `seconds` unless it is given."""
    token = _STUCK_AFTER.set(seconds)
    try:
        yield
    finally:
        _STUCK_AFTER.reset(token)


def _check(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], **seconds: float | None
) -> None:
    if not callable(fn):
        raise TypeError(f"run_ranks needs a function, got {type(fn).__name__}: {fn!r}")
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(
            f"world_size is the number of ranks, an int, got {type(world_size).__name__}: "
            f"{world_size!r}. Write run_ranks(fn, 4, …)."
        )
    if world_size < 1:
        raise ValueError(
            f"world_size must be at least 1, got {world_size}. Write run_ranks(fn, 4, …)."
        )
    for name, limit in seconds.items():
        may_be_none = name == "stuck_after" and limit is None
        if not may_be_none and not (isinstance(limit, int | float) and 0 < limit < float("inf")):
            raise ValueError(f"{name} must be a positive, finite number of seconds, got {limit!r}")
    try:
        bind(fn, args, dict.fromkeys(INJECTED))
    except TypeError as error:
        raise TypeError(
            f"run_ranks cannot call {_name(fn)} with {len(args)} argument(s): {error}. Parameters "
            "named rank, world_size, or device are filled by run_ranks; all others are filled, "
            "in order, from the arguments after world_size."
        ) from None


def _cells() -> dict[str, str]:
    """The text of every cell run so far, by the temporary file name in its code objects.

    Unlike those of cells, names like <string> are shared by unrelated pieces of code.
    """
    return {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name) and "ipykernel" in name
    }


def _innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, without partial objects and decorators."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.unwrap(fn)


def _name(fn: Callable[..., Any]) -> str:
    fn = _innermost(fn)
    return getattr(fn, "__name__", type(fn).__name__)  # never repr(), which holds an address


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    # Otherwise gloo listens on the interface that the host's name resolves to.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK}
    if not isinstance(env, Mapping | None):
        raise TypeError(f'env is a dictionary of strings, such as {{"NAME": "value"}}, got {env!r}')
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env[{name!r}] has to be a string, got {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"env[{name!r}] = {value!r} can be no environment variable: its name must not be "
                "empty or contain '=', and neither may contain a NUL character"
            )
        environment[name] = value
    return environment


def _ship(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        with _SHIPPING, _by_value(fn):
            return cloudpickle.dumps((fn, args))
    except Exception as error:
        raise RanksError(
            f"{_name(fn)} cannot be sent to the ranks: it, or an argument, holds something that "
            f"exists only in this process ({type(error).__name__}: {error}). Open files, locks, "
            "generators, and process groups must be created inside the function; pass plain data "
            "and tensors."
        ) from error


def _own_modules(payload: bytes) -> tuple[str, ...]:
    """The modules of this project that `payload` names: unpickling it imports them."""
    loaded = (name for name in list(sys.modules) if name.partition(".")[0] in _OWN)
    return tuple(name for name in loaded if name.encode() in payload)


@contextlib.contextmanager
def _by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Pickle what a stand-alone script, or a module beside the caller's notebook, defines as code.

    Otherwise each rank would import the whole script. What packages define is pickled by name.
    """
    own = getattr(_innermost(fn), "__module__", None)
    here = os.getcwd()
    # A walk through all modules writes into a thousand pages that a fork shares with its parent.
    beside = any(name.endswith(".py") for name in os.listdir(here))
    names = list(sys.modules) if beside else [own] if own in sys.modules else []
    modules = [
        module
        for name, module in ((name, sys.modules[name]) for name in names)
        if name != "__main__"  # cloudpickle does that by itself
        and (name == own or os.path.dirname(getattr(module, "__file__", None) or "") == here)
        and _stands_alone(module)
    ]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _stands_alone(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return (
        file is not None
        and is_readers_code(file)
        and not os.path.exists(os.path.join(os.path.dirname(file), "__init__.py"))
        and module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    )


def _supervised(job: Job) -> Outcome:
    """Run `job` under a supervisor. Afterwards the supervisor and its ranks are gone."""
    try:
        with forked(supervise, job) as supervisor:
            return supervisor.recv()
    except NotStartedError as error:
        raise RanksError(f"no process could be started for the ranks ({error}).") from error
    except (EOFError, OSError):
        raise RanksError(
            "the ranks' supervisor ended without a result, as did its ranks: it was "
            "killed, or the system ran out of memory or processes. Try again with fewer ranks."
        ) from None


def _show(rank: int, text: str, stream: Any) -> None:
    # splitlines() would also split at \r, form feeds and more.
    for line in text.removesuffix("\n").split("\n") if text else []:
        # Of a line that was redrawn (a progress bar) only the last state is worth reading.
        last_state = line.rstrip("\r").rsplit("\r", 1)[-1]
        if not _NOISE.match(last_state):
            print(f"[rank {rank}] {last_state}", file=stream)


def _receive(rank: int, report: Report) -> Any:
    try:
        return cloudpickle.loads(report.payload)
    except Exception as error:
        raise RanksError(
            f"rank {rank} returned something that cannot be rebuilt here ({type(error).__name__}: "
            f"{error}). Return numbers, strings, tensors, or lists and dictionaries of them."
        ) from error


def _raise_first_failure(outcome: Outcome, job: Job) -> NoReturn:
    reports = outcome.reports
    states = tuple(
        f"rank {rank}: {'finished' if one.status == 'returned' else one.line or one.text}"
        for rank, one in enumerate(reports)
    )
    culprit = _first_failure(reports)
    if culprit is None:
        _raise_timeout(outcome, states, job)
    report = reports[culprit]
    others = "\n".join(f"  {line}" for rank, line in enumerate(states) if rank != culprit)
    others = f"\nThe other ranks at that moment:\n{others}" if others else ""
    of = f"rank {culprit} of {job.world_size}"
    error = rebuild_exception(report.payload)
    if report.status == "raised" and error is not None:
        note = f"Raised on {of}:\n{report.text}{others}"
        error.add_note(note)
        with contextlib.suppress(AttributeError):  # a class with __slots__ does without
            # Asked for by IPython: the rank's own traceback, and not the frames of this package.
            error._render_traceback_ = lambda: note.splitlines()
        raise error
    if report.status == "raised":
        raise RanksError(f"{of} raised:\n{report.text}{others}", states)
    raise RanksError(f"{of} {report.text}.{others}\nNext: {_NEXT[report.status]}", states)


_NEXT = {
    "exited": "let the function return or raise: the others cannot continue without this rank.",
    "died": "look at what that rank did last; its output, if any, is shown above.",
    "unsendable": "change the function's return statement.",
}


def _first_failure(reports: list[Report]) -> int | None:
    failed = [r for r, one in enumerate(reports) if one.status not in ("returned", "unfinished")]
    raised = [r for r in failed if reports[r].status == "raised"]
    victims = [r for r in raised if SECONDARY_ERROR.search(reports[r].text)]
    causes = [r for r in failed if r not in victims] or failed
    first = min((reports[r].time for r in causes), default=0.0)
    return next((r for r in causes if reports[r].time <= first + _SAME_MOMENT), None)


def _raise_timeout(outcome: Outcome, states: tuple[str, ...], job: Job) -> NoReturn:
    late = [report for report in outcome.reports if report.status == "unfinished"]
    lines = "\n".join(f"  {line}" for line in states)
    what = f"did not finish within {job.timeout:g} s"
    if job.stuck_after and late and all(report.waits for report in late):
        # Whichever limit ended them: on a busy machine, that may be the timeout.
        what = "wait for others" if len(late) > 1 else "waits for others"
    if not outcome.all_joined:
        seconds = max(job.timeout, JOIN_WITHIN)
        what = f"did not start within {seconds:g} s"
        action = (
            "try again when the machine is less busy, with fewer ranks, or with a timeout= above "
            f"{seconds:g}."
        )
    elif any(report.waits and not report.text.startswith(STARTING) for report in late):
        action = (
            "every rank has to call the same collectives in the same order, on tensors of the same "
            "shape and dtype; find the one that differs."
        )
    else:
        action = "pass a larger timeout= if the work takes that long, or fix the endless loop."
    of = f"{len(late)} of {job.world_size} ranks"
    raise RanksTimeoutError(
        f"{of} {what}, and every rank was stopped.\n{lines}\nNext: {action}", states
    )
