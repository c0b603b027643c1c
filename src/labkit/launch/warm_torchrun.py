"""torchrun as a fork of the fork server: neither its agent nor its ranks import torch again.

`run_warm(["--nproc-per-node=2", "labs/two_nodes.py"], …)` runs torchrun's agent, with forked ranks
(`labkit.launch.forked_torchrun`), in a process that `labkit.launch.fork_server` forked. Two ranks
take about a second; a new process, which imports torch first, takes about five. With `nodes=2`, two
agents run side by side, as on two nodes (`labkit.launch.nodes`).

torch reads some environment variables when it is loaded, which here happens once, in the server:
TORCH_CPP_LOG_LEVEL, for example. They have the values of the moment at which the server started.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from labkit.launch.fork_server import forked
from labkit.launch.guard import adopt_orphans, die_with_parent, kill_descendants, own_session
from labkit.launch.nodes import agent_environment, agent_options, reserved_port


class _Command(NamedTuple):
    """What the agent is started with, as it is shipped to the fork server."""

    arguments: Sequence[str]
    agents: int
    folder: Path  # the working directory
    environment: dict[str, str]
    stdout: Path
    stderr: Path


def run_warm(
    arguments: Sequence[str], timeout: float, cwd: Path, env: Mapping[str, str], nodes: int = 1
) -> "subprocess.CompletedProcess[str]":
    """Run torchrun with `arguments`, its options and the script; capture what it prints.

    One agent runs for each of `nodes`. `arguments` must not say where they meet: this adds it.
    Nothing that it started is left when this returns, raises, or when the caller is killed.
    Raises subprocess.TimeoutExpired after `timeout` seconds, and
    `labkit.launch.fork_server.NotStartedError` if no process can be started.
    """
    with tempfile.TemporaryDirectory(prefix="torchrun-") as name, _meeting(nodes) as options:
        stdout, stderr = Path(name, "stdout"), Path(name, "stderr")
        environment = agent_environment(env) if nodes > 1 else dict(env)
        command = _Command((*options, *arguments), nodes, cwd, environment, stdout, stderr)
        with forked(_supervise, command, name="labkit torchrun") as supervisor:
            ended = supervisor.poll(timeout)
            code = _exit_code(supervisor) if ended else None
        # Read only now: leaving the block ended every process that could still write.
        said = [
            path.read_text("utf-8", "replace") if path.exists() else "" for path in (stdout, stderr)
        ]
    if code is None:
        raise subprocess.TimeoutExpired(list(arguments), timeout, *said)
    return subprocess.CompletedProcess(list(arguments), code, *said)


@contextlib.contextmanager
def _meeting(nodes: int) -> Iterator[list[str]]:
    """The options by which the agents meet. A port among them stays reserved inside the block."""
    if nodes <= 1:
        yield ["--standalone"]
        return
    with reserved_port() as port:
        yield agent_options(nodes, port)


def _exit_code(supervisor: Connection) -> int:
    try:
        return supervisor.recv()
    except EOFError:
        return 128 + signal.SIGKILL  # a shell's code for a process that was killed


def _supervise(caller: Connection, command: _Command) -> None:
    """Run the agent; end it, and all that it started, when the caller closes its connection."""
    own_session()
    adopt_orphans()
    agent = multiprocessing.get_context("fork").Process(target=_agent, args=(command,))
    agent.start()
    try:
        if caller not in wait([caller, agent.sentinel]):
            agent.join()
            kill_descendants()
            code = agent.exitcode or 0
            caller.send(code if code >= 0 else 128 - code)
    finally:
        if agent.is_alive():
            agent.kill()
            agent.join()
        kill_descendants()


def _agent(command: _Command) -> None:
    # Loaded by the fork server; at the top, they would make the caller import torch, too.
    import torch.distributed as dist

    from labkit.launch.forked_torchrun import agent, side_by_side

    die_with_parent()
    for number, path in ((1, command.stdout), (2, command.stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    # torch read it when it was loaded, in the fork server.
    dist.set_debug_level_from_env()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    sys.path.insert(0, "")  # as `python -m` does; a rank replaces it by the script's folder
    if command.agents > 1:
        sys.exit(side_by_side(command.agents, list(command.arguments)))
    agent(list(command.arguments))
