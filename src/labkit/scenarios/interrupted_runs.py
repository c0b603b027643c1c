"""Four runs of `labs/when_a_node_fails.py`, started at once: each one is mostly waiting."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from labkit.launch.scripts import ScriptError, run_script

LAB = "labs/when_a_node_fails.py"


class InterruptedRuns(NamedTuple):
    """The outputs of two finished runs, and the errors of two that failed by themselves, not
    at the time limit.

    The code is not always 1: if a node is lost, it is the one of its killed agent.
    """

    uninterrupted: str
    killed: str
    stuck: ScriptError
    gone: ScriptError


def interrupted_runs(timeout: float = 6) -> InterruptedRuns:
    """Run the lab on two ranks: uninterrupted; rank 1 killed, stuck; rank 1's node lost.

    `timeout` is the time limit in seconds of one collective. Raises ScriptError if a run that
    should finish fails. Raises RuntimeError if a run that should fail finishes, or is stopped
    at the time limit of `run_script`.
    """
    two_nodes = {"ranks": 1, "nodes": 2}
    with _folder() as folder, ThreadPoolExecutor() as side_by_side:

        def start(*options: object, **launch: int) -> Future[str]:
            return side_by_side.submit(run_script, LAB, *options, **launch)

        finished = start(ranks=2)
        checkpoint = ("--checkpoint", folder / "run.pt")
        killed = start(*checkpoint, "--kill", "1@7", **two_nodes, max_restarts=1)
        stuck = start("--stick", "1@5", "--timeout", timeout, **two_nodes)
        gone = start("--lose-node", "1@5", "--timeout", timeout, **two_nodes)
        return InterruptedRuns(finished.result(), killed.result(), _error(stuck), _error(gone))


def shown(output: str) -> str:
    """The output without the hash: its last bits differ between processors."""
    return re.sub(r"^weights \w+", "weights (a hash)", output, flags=re.MULTILINE)


def missing(error: ScriptError) -> list[str]:
    """The ranks that the others named, without the name of the machine."""
    named = r"((?:stuck|gone|finished early): rank \d+) on \S+(, last seen at .*)"
    return sorted({"".join(found) for found in re.findall(named, error.said)})


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _error(run: Future[str]) -> ScriptError:
    error = run.exception()
    if isinstance(error, ScriptError) and error.exit_code is not None:
        return error
    raise RuntimeError(f"{LAB} did not fail as intended: {error or run.result()}") from error
