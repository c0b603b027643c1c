"""In a process of a certificate: replace what has to be replaced, then run the script.

Processes that the script starts do the same once they have imported torch; see `site`.
"""

import atexit
import faulthandler
import functools
import importlib
import os
import signal
import sys
import traceback
from typing import Any

from ddp_doctor.certificate.guard import report
from ddp_doctor.certificate.plan import (
    AT_MOST,
    NEEDS_RANKS,
    STARTS_RANKS,
    WATCHED,
    WORLD_IN_SCRIPT,
    Part,
)

LAUNCHED = "DDP_DOCTOR_LAUNCHED"  # the process that was started as a rank
_processes: list[int] = []  # that have done it


def install() -> None:
    """Prepare this process. Idempotent; does nothing in a process of no certificate."""
    part = Part.from_environment()
    if part is None or os.getpid() in _processes:
        return
    _processes.append(os.getpid())
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # `starts` asks where this one is
    part.can_be_asked(os.getpid()).touch()
    _keep_groups()
    if part.kind == "observed":
        from ddp_doctor.options import Options
        from ddp_doctor.run.start import RUN, start

        os.environ[RUN] = str(part.journals)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        start(Options(first=WATCHED, leave_after=AT_MOST, cpu=part.cpu), leader=False)
        return
    from ddp_doctor.certificate.fixed import Replacements
    from ddp_doctor.certificate.loaders import Loaders
    from ddp_doctor.certificate.record import StepNotes
    from ddp_doctor.certificate.steps import Steps
    from ddp_doctor.certificate.tensors import Tensors
    from ddp_doctor.run import on_cpu

    replacements = Replacements(StepNotes())
    if part.cpu:
        on_cpu.install(replacements.notes.replacements.append)
    _replace_groups(part)
    if part.is_one:
        _replace_trainers()
    steps = Steps(part, replacements)
    tensors = Tensors(steps)
    Loaders(steps, tensors)
    tensors.__enter__()


def _replace_groups(part: Part) -> None:
    """One process is a group of one, whatever the script says; ranks without a launcher end."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    init: Any = dist.init_process_group

    @functools.wraps(init)
    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, **kwargs: Any
    ) -> None:
        by_launcher = "rank" not in kwargs and kwargs.get("store") is None
        by_launcher &= str(init_method or "env://").startswith("env://")
        if by_launcher and "RANK" not in os.environ:
            part.path(NEEDS_RANKS).touch()
            os._exit(0)
        if os.environ.get(LAUNCHED, str(os.getpid())) != str(os.getpid()):
            part.path(STARTS_RANKS).touch()
            os._exit(0)
        if part.is_one:
            _be_one_rank(part, kwargs)
        if timeout is not None:
            kwargs["timeout"] = timeout
        init(backend, init_method, **kwargs)

    replacement: Any = init_process_group
    if part.is_one:
        dist.all_gather = _gather_of_one(dist.all_gather)
    dist.init_process_group = replacement
    dist.distributed_c10d.init_process_group = replacement


def _be_one_rank(part: Part, arguments: dict[str, Any]) -> None:
    """Change what one process tells its group; of ranks that the script starts, one goes on."""
    if arguments.get("rank", 0) > 0:
        os._exit(0)
    if arguments.get("world_size", 1) > 1:
        arguments["world_size"] = 1
        part.path(WORLD_IN_SCRIPT).touch()


def _gather_of_one(gather: Any) -> Any:
    """In one process nothing is lost on the way: what it gathers from itself carries gradient."""

    def all_gather(tensor_list: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not tensor.requires_grad or len(tensor_list) != 1:
            return gather(tensor_list, tensor, *args, **kwargs)
        tensor_list[0].copy_(tensor)
        return None

    return all_gather


def _replace_trainers() -> None:
    """One process has one device, whatever the script says to Lightning."""
    from ddp_doctor.run import on_cpu

    package = on_cpu.lightning_of_the_script()
    module = importlib.import_module(package) if package else None

    def one_device(args: list[Any], kwargs: dict[str, Any]) -> None:
        kwargs |= {"devices": 1, "num_nodes": 1}

    for name in ("Trainer", "Fabric"):
        if kind := getattr(module, name, None):
            on_cpu.change_call(kind, "__init__", one_device)


def _keep_groups() -> None:
    """Let groups go with the process. A wrapper's destructor may end one, and wait for a thread of
    gloo that waits for the interpreter (torch 2.13): one script in some dozens would hang.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    from ddp_doctor.certificate.calls import hook_call

    groups: list[Any] = []

    def keep(group: Any = None) -> None:
        groups.append(group or dist.group.WORLD)

    hook_call(dist, "destroy_process_group", before=keep)


def main() -> None:
    report()
    if "RANK" in os.environ:
        os.environ[LAUNCHED] = str(os.getpid())
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]  # libraries look at it while they are imported
    # Run as a program, this file is another module than the one that `site` imports with torch.
    importlib.import_module("torch")
    importlib.import_module("ddp_doctor.certificate.child").install()
    from ddp_doctor.run.script import run_script

    code = 0
    try:
        run_script(script, arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # the observers' last facts
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what an interpreter does at its end may wait for threads of the script's


if __name__ == "__main__":
    main()
