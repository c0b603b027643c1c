"""Several nodes on one machine: a torchrun agent for each, as on a cluster, and no rights needed.

    python -m labkit.launch.nodes --nodes 2 --nproc-per-node 4 labs/accumulate_vs_ddp.py

Each agent is started with the command that a cluster's node would get, `torchrun --nnodes 2
--rdzv-backend c10d --rdzv-endpoint HOST:PORT …` (or, with --forked, as a fork of one process that
is given the same options); they meet on the loopback interface and start
their own ranks. What is missing of a cluster: hostnames, addresses and a network between the nodes.
`labs/two_hosts.sh` has these.

Ends when all agents have ended, with the first failing one's exit code. Once one has failed, the
others have a minute to notice. However this process itself ends, by Ctrl-C or killed, the agents
and their ranks end with it: a guard holds each, or all forks (`labkit.launch.guard`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

GRACE = 60.0  # seconds


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of the loopback interface that the system gives to nobody else meanwhile.

    It is bound and not listened at; a server that sets SO_REUSEADDR, as torch's store does, may
    still listen there (Linux).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


TORCHRUN, FORKED_TORCHRUN = "torch.distributed.run", "labkit.launch.forked_torchrun"


def agent_command(nodes: int, port: int, arguments: list[str], *launcher: str) -> list[str]:
    """What a node is started with.

    `launcher`: a module that takes torchrun's command line, and what it is to be given before.
    """
    return [
        *(sys.executable, "-m", *launcher),
        *("--nnodes", str(nodes), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"),
        # How long an agent waits for a node that does not come, or does not come back.
        *("--rdzv-conf", "join_timeout=60"),
        *arguments,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=at_least_one, default=2, help="agents (default 2)")
    parser.add_argument(
        "--forked",
        action="store_true",
        help="let all agents, and their ranks, be forks of one process, which loads torch once",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="torchrun's further options, and the script"
    )
    given, options = parser.parse_known_args()
    interface = "lo" if sys.platform.startswith("linux") else "lo0"
    # The second is for --max-restarts: see labkit.launch.lab.joined.
    defaults = {"GLOO_SOCKET_IFNAME": interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    # Or torch warns, with many lines, that the agent which ended first does not answer any more.
    defaults["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    environment = {**defaults, **os.environ}
    with reserved_port() as port:
        of_torchrun = given.nodes, port, options + given.arguments
        commands = [agent_command(*of_torchrun, TORCHRUN)] * given.nodes
        if given.forked:
            agents = "--agents", str(given.nodes)
            commands = [agent_command(*of_torchrun, FORKED_TORCHRUN, *agents)]
        sys.exit(first_failure([start(command, environment) for command in commands]))


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is no number of nodes: give 1 or more")
    return number


def start(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` below a guard that kills it, and all that it started, once stdin closes.

    stdin is a pipe whose other end only this process holds, so it closes with this process.
    """
    guarded = [sys.executable, "-m", "labkit.launch.guard", *command]
    return subprocess.Popen(guarded, stdin=subprocess.PIPE, env=environment)


def first_failure(agents: list[subprocess.Popen[bytes]]) -> int:
    """The exit code of the first agent that fails, or 0; none is running any more.

    `agents` are what `start` returned.
    """
    failed = first_to_fail(lambda: [agent.poll() for agent in agents])
    for agent in agents:
        agent.stdin.close()  # ends those that are still running
    for agent in agents:
        agent.wait()
    return failed


def first_to_fail(exit_codes: Callable[[], Sequence[int | None]]) -> int:
    """Wait until no exit code is None any more, `GRACE` seconds at most once one is not 0.

    Returns the first one that is not 0, or 0.
    """
    failed, deadline = 0, math.inf
    while None in (codes := exit_codes()) and time.monotonic() < deadline:
        if not failed and (failed := next(filter(None, codes), 0)):
            deadline = time.monotonic() + GRACE
        time.sleep(0.05)
    return failed or next(filter(None, codes), 0)


if __name__ == "__main__":
    main()
