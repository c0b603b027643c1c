"""torchrun with forked ranks: one process imports torch, and every rank is a fork of it.

    python -m labkit.launch.forked_torchrun --standalone --nproc-per-node 4 labs/two_nodes.py

The command takes torchrun's options, runs torchrun's agent, and gives each rank torchrun's
environment. It adds two of torchrun's own options, `--run-path --start-method fork`, so that a
rank is a fork of the agent instead of a new interpreter that imports torch again. The agent first
imports torch._dynamo, which torch's DDP and its optimizers would otherwise import on first use.

This saves 4 s of processor time per rank, which is most of a lab's run time. Its limits:

1. Forked ranks share one seed of string hashes, and therefore one order of sets.
2. A rank ends without running its atexit handlers.
3. The agent waits forever for a rank that ends with `os._exit(0)`.
4. The first argument that ends in .py is taken as the script.

Without os.fork (Windows), this is plain torchrun.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import types
from pathlib import Path

from labkit.launch.guard import die_with_parent
from labkit.launch.loading import loading
from labkit.launch.nodes import first_to_fail

with loading():
    import torch
    import torch._dynamo  # here, so that not each rank loads it
    from torch.distributed.run import main as torchrun

AS_RANK = "--as-rank"  # what the agent starts this file with


def agent(arguments: list[str]) -> None:
    """Run torchrun's agent with the command line that torchrun would be given."""
    if hasattr(os, "fork"):
        # torchrun is to run this file on each rank, which then runs the script.
        scripts = (at for at, word in enumerate(arguments) if word.endswith(".py"))
        at = next(scripts, len(arguments))
        this = [str(Path(__file__).resolve()), AS_RANK] if at < len(arguments) else []
        options = ["--run-path", "--start-method=fork", *arguments[:at]]
        arguments = [*options, *this, *arguments[at:]]
    torchrun(arguments)


def rank(script: str) -> None:
    """Run `script` as a fresh interpreter would. `sys.argv` begins with its path."""
    path = Path(script).resolve()
    sys.path[0] = str(path.parent)
    # A fork begins with its parent's random generators, and with what it does at a signal.
    torch.seed()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():  # set by torchrun: too late
        torch.set_num_threads(int(threads))
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


def side_by_side(count: int, arguments: list[str]) -> int:
    """Run `count` agents, each a fork of this process, and return their exit code.

    An agent does not outlive this process. What else it leaves behind, the supervisor above this
    process ends (`labkit.launch.warm_torchrun`).
    """
    fork = multiprocessing.get_context("fork")
    agents = [fork.Process(target=_agent_of_a_node, args=(arguments,)) for _ in range(count)]
    try:
        for one in agents:
            one.start()
        code = first_to_fail(lambda: [one.exitcode for one in agents])
    finally:
        for running in multiprocessing.active_children():
            running.kill()
    return code if code >= 0 else 128 - code  # a shell's word for a signal


def _agent_of_a_node(arguments: list[str]) -> None:
    die_with_parent()
    agent(arguments)


if __name__ == "__main__":
    if AS_RANK in sys.argv[1:2]:
        sys.argv = sys.argv[2:]
        rank(sys.argv[0])
    else:
        agent(sys.argv[1:])
