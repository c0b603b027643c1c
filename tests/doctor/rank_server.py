"""Runs corpus scripts in processes forked from one that has already imported torch.

Starting an interpreter and importing torch takes 3 s of processor time per rank; a fork takes none.
Requests and answers are one JSON line each, on standard input and output. A request names the
script, the number of ranks, how it is launched, whether the doctor looks on, and a scratch folder.
"""

import atexit
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from forked_rank import keep_groups_until_the_end

from labkit.launch.memory import loading
from labkit.launch.nodes import reserved_port

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "src"


def main() -> None:
    with loading():
        for name in ("torch", "torch._dynamo", "torch.distributed", *sys.argv[1:]):
            importlib.import_module(name)
    sys.path.insert(0, str(HERE / "fingerprint"))
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(**request)), flush=True)


def run(
    script: str, ranks: int, launch: str, doctor: list[str] | None, scratch: str, timeout: float
) -> dict[str, object]:
    """Run a script to its end. As torchrun does, end the other ranks once one has failed."""
    folder = Path(scratch)
    (folder / "steps").mkdir(parents=True)
    (folder / "cwd").mkdir()
    with reserved_port() as port:
        started = time.monotonic()
        count = ranks if launch == "torchrun" else 1
        children = {
            _fork(script, rank, ranks, port, launch, doctor, folder): rank for rank in range(count)
        }
        codes: dict[int, int] = {}
        failed_at = None
        while len(codes) < count:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in children:
                codes[children[pid]] = os.waitstatus_to_exitcode(status)
                if codes[children[pid]] and failed_at is None:
                    failed_at = time.monotonic()
            elif pid == 0:
                time.sleep(0.01)
            late = time.monotonic() - started > timeout
            if late or (failed_at is not None and time.monotonic() - failed_at > 4.0):
                for child, rank in children.items():
                    if rank not in codes:
                        os.killpg(child, signal.SIGKILL if late else signal.SIGTERM)
    return {
        "codes": [codes[rank] for rank in range(count)],
        "seconds": time.monotonic() - started,
        "pids": sorted(children),
    }


def _fork(
    script: str,
    rank: int,
    ranks: int,
    port: int,
    launch: str,
    doctor: list[str] | None,
    folder: Path,
) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for number, name in ((1, "out"), (2, "err")):
            target = os.open(folder / f"{name}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(target, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder / "cwd")
        if launch == "torchrun":
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks),
                GROUP_RANK="0",
                TORCHELASTIC_RUN_ID=f"corpus{port}",
                TORCHELASTIC_RESTART_COUNT="0",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        os.environ["FINGERPRINTS"] = str(folder / "steps")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "fingerprint"), str(SOURCES)])
        sys.path.insert(0, str(SOURCES))
        import steps

        steps.watch(str(folder / "steps"))
        keep_groups_until_the_end()
        code = _execute(script, doctor)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return 0


def _execute(script: str, doctor: list[str] | None) -> int:
    """Run the script as an interpreter would, up to its exit code and exit handlers."""
    code = 0
    atexit._clear()  # what the server registered is the server's
    import ddp_doctor.__main__ as program

    try:
        if doctor is None:
            sys.argv = [script]
            program.run_script(script)
        else:
            sys.argv = ["ddp_doctor", *doctor, script]
            program.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = (
            type(error),
            error,
            error.__traceback__,
        )
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    import multiprocessing.util

    multiprocessing.util._exit_function()
    return code


if __name__ == "__main__":
    main()
