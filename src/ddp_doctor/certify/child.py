"""In a process of a certificate: replace what has to be replaced, then run the script.

Processes that the script starts do the same once they have imported torch; see `site`.
"""

import os
import sys
from typing import Any

from ddp_doctor.certify.plan import Part

NEEDS_RANKS = "needs-ranks"  # a file: the script expects a launcher
_installed: list[int] = []  # the process that has done it


def install() -> None:
    """Prepare this process. Idempotent; does nothing in a process of no certificate."""
    part = Part.of_this_process()
    if part is None or os.getpid() in _installed:
        return
    _installed.append(os.getpid())
    from ddp_doctor.certify.fixed import Fixed
    from ddp_doctor.certify.loaders import Loaders
    from ddp_doctor.certify.steps import Steps
    from ddp_doctor.certify.tensors import Tensors

    _groups(part)
    steps = Steps(part, Fixed())
    tensors = Tensors(steps)
    Loaders(steps, tensors.unseen)
    tensors.__enter__()


def _groups(part: Part) -> None:
    """One process is a group of one, whatever the script says; ranks without a launcher end."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    init = dist.init_process_group

    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, **given: Any
    ) -> None:
        where = init_method or "env://"
        alone = "rank" not in given and given.get("store") is None
        if alone and str(where).startswith("env://") and "RANK" not in os.environ:
            part.path(NEEDS_RANKS).parent.mkdir(parents=True, exist_ok=True)
            part.path(NEEDS_RANKS).touch()
            os._exit(0)
        if part.one:
            if given.get("rank", 0) > 0:
                os._exit(0)  # only the first of the ranks that the script starts goes on
            if given.get("world_size", 1) > 1:
                given["world_size"] = 1
                part.path("world-in-script").parent.mkdir(parents=True, exist_ok=True)
                part.path("world-in-script").touch()
        if timeout is not None:
            given["timeout"] = timeout
        init(backend, init_method, **given)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def main() -> None:
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    install()
    from ddp_doctor.script import run_script

    run_script(script)


if __name__ == "__main__":
    main()
