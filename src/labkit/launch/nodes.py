"""Several nodes on one machine: one torchrun agent per node, without special rights.

    python -m labkit.launch.nodes --nodes 2 --nproc-per-node 4 labs/accumulate_vs_ddp.py

Each agent runs the command that a node of a cluster would run: `torchrun --nnodes 2 --rdzv-backend
c10d --rdzv-endpoint HOST:PORT …`. The agents meet on the loopback interface and start their own
ranks. A cluster also has different hostnames, addresses, and a network between its nodes;
`labs/two_hosts.sh` provides these. `labkit.launch.warm_torchrun` runs the same agents as forks.

The command ends when all agents have ended, with the exit code of the first one that failed. After
a failure, the other agents get one minute to notice. If the command itself is interrupted or
killed, the agents and their ranks end with it (`labkit.launch.guard`).
"""

import argparse
import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from labkit.launch.arguments import positive

GRACE = 60.0  # seconds


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


def agent_options(nodes: int, port: int) -> list[str]:
    """What torchrun is told on each node: how many there are, and where they meet."""
    return [
        *("--nnodes", str(nodes), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"),
        # How long an agent waits for a node that does not come, or does not come back.
        *("--rdzv-conf", "join_timeout=60"),
    ]


def agent_environment(given: Mapping[str, str]) -> dict[str, str]:
    """`given`, with what agents on one machine need where it does not say otherwise."""
    interface = "lo" if sys.platform.startswith("linux") else "lo0"
    # The second is for --max-restarts: see labkit.launch.lab.join_ranks.
    defaults = {"GLOO_SOCKET_IFNAME": interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    # Otherwise torch warns at length that the agent that ended first no longer answers. An agent
    # that is forked from the warm server has loaded torch already, and does not read this.
    defaults["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    return {**defaults, **given}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=positive, default=2, help="agents (default 2)")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="further options of torchrun, and the script"
    )
    given, options = parser.parse_known_args()
    with reserved_port() as port:
        command = [sys.executable, "-m", "torch.distributed.run", *agent_options(given.nodes, port)]
        command += options + given.arguments
        agents = [start(command, agent_environment(os.environ)) for _ in range(given.nodes)]
        sys.exit(first_failure(agents))


def start(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` under a guard that kills it and everything it started when stdin closes.

    stdin is a pipe whose other end only this process holds, so it closes when this process ends.
    """
    guarded = [sys.executable, "-m", "labkit.launch.guard", *command]
    return subprocess.Popen(guarded, stdin=subprocess.PIPE, env=environment)


def first_failure(agents: list[subprocess.Popen[bytes]]) -> int:
    """The exit code of the first agent that fails, or 0; no agent is running afterwards.

    `agents` are the results of `start`.
    """
    failed = first_to_fail(lambda: [agent.poll() for agent in agents])
    for agent in agents:
        agent.stdin.close()  # ends those that are still running
    for agent in agents:
        agent.wait()
    return failed


def first_to_fail(exit_codes: Callable[[], Sequence[int | None]]) -> int:
    """Wait until every exit code is known, but at most `GRACE` seconds after the first failure.

    Returns the first exit code that is not 0, or 0.
    """
    failed, deadline = 0, math.inf
    while None in (codes := exit_codes()) and time.monotonic() < deadline:
        if not failed and (failed := next(filter(None, codes), 0)):
            deadline = time.monotonic() + GRACE
        time.sleep(0.05)
    return failed or next(filter(None, codes), 0)


if __name__ == "__main__":
    main()
