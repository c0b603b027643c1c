"""torchrun with forked ranks: one process imports torch, and every rank is a fork of it.

    python -m labkit.launch.nodes --nodes 2 --nproc-per-node 4 labs/accumulate_vs_ddp.py

`make lab` runs it with one node and `--lab`.

One torchrun agent runs per node, and is given what a node of a cluster would be given: `torchrun
--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT …`, and the further options of the command.
The agents connect over the loopback interface; `labs/two_hosts.sh` also has two hostnames,
addresses, and a network between them.

Two of torchrun's own options are added, `--run-path --start-method fork`, so that a rank is a fork
of its agent instead of a new interpreter that imports torch again. This saves 4 s of processor time
per rank. Its limits: forked ranks share one seed of string hashes, and therefore one order of sets;
a rank ends without its atexit handlers; the agent waits forever for one that ends with
`os._exit(0)`; the first argument that ends in .py is taken as the script.

The command ends when all agents have ended, with the exit code of the first one that failed. After
a failure, the other agents get one minute to notice. With `--lab`, the code is that of the first
rank that failed, and torchrun's report is left out: the script has said what is wrong. However the
command ends, its agents end with it, and ranks end with their agent.

`run_warm` captures the output, and forks the agents from a server that has loaded torch already
(`labkit.launch.forks`): two ranks take about a second. Variables that torch reads when it is loaded
(TORCH_CPP_LOG_LEVEL, for example) are read there, once.
"""

import argparse
import contextlib
import functools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from labkit.launch.arguments import explained_by, positive
from labkit.launch.forks import (
    OF_THIS_PROCESS,
    ForkServer,
    fresh_randomness,
    start_forked,
    stop_forked,
)
from labkit.launch.guard import die_with_parent
from labkit.launch.memory import check_memory, gc_paused
from labkit.launch.popen import run_forked, shells

GRACE = 60.0  # seconds
LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"  # the interface's name
AS_RANK = "--as-rank"  # what an agent starts this file with


def main() -> None:
    parser = explained_by(__doc__)
    parser.add_argument("--nodes", type=positive, default=2, help="agents (default 2)")
    parser.add_argument("--nproc-per-node", default="1", help="ranks of each agent (default 1)")
    parser.add_argument("--lab", action="store_true", help="one node, without torchrun's report")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="further options of torchrun, and the script"
    )
    given, options = parser.parse_known_args()
    ranks = given.nproc_per_node
    try:
        if ranks not in ("auto", "cpu", "gpu"):
            if not (ranks.isascii() and ranks.isdecimal()) or int(ranks) < 1:
                raise ValueError(f"{ranks!r} is no number of ranks: give one such as 4.")
            check_memory(given.nodes * int(ranks))
    except ValueError as error:
        sys.exit(str(error))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would do so, with a warning
    if given.nodes > 1:
        # Otherwise torch warns at length that the agent that ended first no longer answers.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    load_torchrun()  # once, for all agents
    with agents_of(given.nodes, os.environ) as (where, environment):
        os.environ.update(environment)
        command = [*where, "--nproc-per-node", ranks, *options, *given.arguments]
        if given.nodes == 1:
            sys.exit(_run_lab(command) if given.lab else run_agent(command))
        sys.exit(_end_of([start_forked(run_agent, command) for _ in range(given.nodes)]))


def run_warm(
    arguments: Sequence[str],
    timeout: float,
    cwd: Path,
    env: Mapping[str, str],
    nodes: int = 1,
    linger: float = 0.0,
    preload: Sequence[str] = (),
) -> "subprocess.CompletedProcess[str]":
    """Run torchrun with `arguments`, its options and the script, as `run_forked` does.

    One agent runs for each of `nodes`. `arguments` must not name the rendezvous: this adds it.
    Ranks find the modules `preload` loaded.
    """
    with agents_of(nodes, env) as (options, environment):
        target = functools.partial(_warm_agents, nodes=nodes)
        words = [*options, *arguments]
        return run_forked(server_with(*preload), target, words, timeout, cwd, environment, linger)


@functools.cache
def server_with(*modules: str) -> ForkServer:
    """This process's server, or one that has loaded `modules`, too."""
    return ForkServer(*modules) if modules else OF_THIS_PROCESS


def _warm_agents(arguments: list[str], nodes: int) -> None:
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # torch read it when it was loaded, in the fork server
    sys.path.insert(0, "")  # as `python -m` does; a rank replaces it by the script's folder
    if nodes == 1:
        run_agent(arguments)
    else:
        sys.exit(_end_of([start_forked(run_agent, arguments) for _ in range(nodes)]))


def as_script(words: list[str]) -> None:
    """Run a script, `words[0]`, with its arguments, in a fork of this process's parent."""
    sys.path.insert(0, "")
    sys.argv = [str(word) for word in words]
    run_rank(words[0], os.getppid())


def _end_of(agents: list[BaseProcess]) -> int:
    """The first exit code of the agents that is not 0, or 0; they have ended then.

    Waits at most `GRACE` seconds after the first failure.
    """
    failed, deadline = 0, math.inf
    try:
        while None in (codes := [agent.exitcode for agent in agents]):
            if time.monotonic() > deadline:
                break
            if not failed and (failed := next(filter(None, codes), 0)):
                deadline = time.monotonic() + GRACE
            wait([agent.sentinel for agent in agents if agent.is_alive()], timeout=0.05)
    finally:
        stop_forked(*agents)
    return shells(failed or next(filter(None, codes), 0))


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of the loopback interface that the system gives to no other process meanwhile.

    The port is bound but not listened on. A server that sets SO_REUSEADDR, such as torch's store,
    can still listen there (Linux).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def agents_of(nodes: int, given: Mapping[str, str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The options and the environment of each agent of a job; a port stays reserved meanwhile.

    One node needs no more than `given`. Several agents on one machine get what they need where
    `given` does not say otherwise.
    """
    if nodes < 2:
        yield ["--standalone"], dict(given)
        return
    defaults = {
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        # For --max-restarts: see labkit.launch.lab.join_ranks.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with reserved_port() as port:
        options = [
            *("--nnodes", str(nodes), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"),
            # How long an agent waits for a node that does not come, or does not come back.
            *("--rdzv-conf", "join_timeout=60"),
        ]
        yield options, {**defaults, **given}


def load_torchrun() -> types.ModuleType:
    """torchrun's module, with what torch's DDP and optimizers import on first use."""
    with gc_paused():
        import torch._dynamo  # noqa: F401
        from torch.distributed import run
    return run


def run_agent(arguments: list[str]) -> None:
    """Run torchrun's agent with the command line that torchrun would be given."""
    load_torchrun().main(["--run-path", "--start-method=fork", *through_this_file(arguments)])


def _run_lab(arguments: list[str]) -> int:
    """Run one agent, without torchrun's report; the exit code of the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run_agent(arguments)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        return shells(first.exitcode)
    return 0


def through_this_file(arguments: Sequence[str]) -> list[str]:
    """torchrun's arguments, changed so that each rank runs `run_rank` of this file."""
    at = next((i for i, word in enumerate(arguments) if word.endswith(".py")), len(arguments))
    this = [str(Path(__file__).resolve()), AS_RANK, str(os.getpid())] if arguments[at:] else []
    return [*arguments[:at], *this, *arguments[at:]]


def run_rank(script: str, agent: int) -> None:
    """Run `script` as a fresh interpreter would, until the process `agent` ends.

    `sys.argv` begins with the script's path.
    """
    import torch

    die_with_parent(agent)
    path = Path(script).resolve()
    sys.path[0] = str(path.parent)
    fresh_randomness()
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():  # set by torchrun: too late
        torch.set_num_threads(int(threads))
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=True)  # torchrun's ranks do not buffer at all
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as leave:
        if leave.code:  # None and False mean success, too, which torchrun does not know of a fork
            raise
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:  # torchrun would keep it for its own report, at the end of all
        traceback.print_exc()
        sys.exit(1)
    finally:
        # gloo's thread may still wait for the interpreter's lock, to drop its last collective. If a
        # DDP wrapper of the script is freed first, its destructor joins that thread with the lock
        # held, and both wait forever (torch 2.13). Asleep, this thread holds no lock.
        time.sleep(0.05)


if __name__ == "__main__":
    if AS_RANK in sys.argv[1:2]:
        parent = int(sys.argv[2])
        sys.argv = sys.argv[3:]
        run_rank(sys.argv[0], parent)
    else:
        main()
