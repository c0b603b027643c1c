"""`make lab`: run a lab under torchrun, and end with what the lab itself said.

    python -m labkit.launch.make_lab RANKS labs/NAME.py [ARGUMENTS…]

torchrun reports a rank that failed with a log line per rank and a traceback of its own. A lab that
refuses its arguments or the number of ranks has said so already, so that report is left out here.
The exit code is that of the first rank that failed. However this process ends, its ranks end, too.
"""

import logging
import os
import sys

from labkit.launch.memory import check_memory
from labkit.launch.nodes import through_this_file


def refusal(ranks: str) -> str:
    """Why this machine does not start `ranks` ranks; empty if it does."""
    if not (ranks.isascii() and ranks.isdigit() and int(ranks) > 0):
        return f"RANKS is {ranks!r}, and has to be a positive whole number, for example RANKS=4."
    try:
        check_memory(int(ranks))
    except ValueError as error:
        return str(error)
    return ""


def main(ranks: str, script: str, *arguments: str) -> int:
    if reason := refusal(ranks):
        print(reason, file=sys.stderr)
        return 2
    # Before torchrun is imported: it takes the number of threads from there.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    command = ["--standalone", "--nproc-per-node", ranks, script, *arguments]
    try:
        run.run(run.parse_args(through_this_file(command)))
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        # A negative code is a signal; a shell adds its number to 128.
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
