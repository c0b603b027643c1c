"""For when_a_node_fails.ipynb: four runs of the lab, started at once because each one
is mostly waiting, and a figure of the stores of a restart.
"""

import re
from concurrent.futures import Future, ThreadPoolExecutor
from tempfile import TemporaryDirectory
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from labkit.book.figures import RANKS, TRUTH, WRONG, use
from labkit.launch.scripts import ScriptError, run_script

LAB = "labs/when_a_node_fails.py"


class InterruptedRuns(NamedTuple):
    """The outputs of two finished runs, and the errors of two that failed by
    themselves.

    The code is not always 1: if a node is lost, it is the one of its killed agent.
    """

    uninterrupted: str
    killed: str
    stuck: ScriptError
    gone: ScriptError


def interrupted_runs(timeout: float = 6) -> InterruptedRuns:
    """Run the lab on two ranks: uninterrupted; rank 1 killed, stuck; its node lost.

    `timeout` is the time limit in seconds of one collective. Raises ScriptError if a
    run that should finish fails. Raises RuntimeError if a run that should fail
    finishes, or is stopped at the time limit of `run_script`.
    """
    two_nodes = {"ranks": 1, "nodes": 2}
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as side_by_side:

        def start(*options: object, **launch: int) -> Future[str]:
            return side_by_side.submit(run_script, LAB, *options, **launch)

        finished = start(ranks=2)
        checkpoint = ("--checkpoint", f"{folder}/run.pt")
        killed = start(*checkpoint, "--kill", "1@7", **two_nodes, max_restarts=1)
        stuck = start("--stick", "1@5", "--timeout", timeout, **two_nodes)
        gone = start("--lose-node", "1@5", "--timeout", timeout, **two_nodes)
        return InterruptedRuns(
            finished.result(), killed.result(), _error(stuck), _error(gone)
        )


def shown(output: str) -> str:
    """The output without the hash: its last bits differ between processors."""
    return re.sub(r"^weights \w+", "weights (a hash)", output, flags=re.MULTILINE)


def missing(error: ScriptError) -> list[str]:
    """The ranks that the others named, without the name of the machine."""
    named = r"((?:stuck|gone|finished early): rank \d+) on \S+(, last seen at .*)"
    return sorted({"".join(found) for found in re.findall(named, error.said)})


def _error(run: Future[str]) -> ScriptError:
    error = run.exception()
    if isinstance(error, ScriptError) and error.exit_code is not None:
        return error
    raise RuntimeError(
        f"{LAB} did not fail as intended: {error or run.result()}"
    ) from error


_GRAY = "#F2F4F6"


def draw_restart_stores() -> Figure:
    """Left: torchrun's default; right: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.

    Rank 1, on node 1, was killed. Only its agent counts a restart; both restart their
    ranks.
    """
    use()
    figure, (shared, fresh) = plt.subplots(1, 2, figsize=(9.0, 4.1), facecolor="white")
    shared.set_title("default: one store for all attempts", fontsize=11)
    _agents(shared)
    _box(shared, 0.35, 0.0, 3.8, 1.15, _GRAY, TRUTH)
    _words(shared, 2.25, 0.84, "torchrun's store", TRUTH, 10)
    dead = "rank 0's old address (dead)\nrank 1's old address (dead)"
    _words(shared, 2.25, 0.36, dead, WRONG, 9)
    for x in (1.0, 3.5):
        _arrow(shared, (x, 2.05), (x, 1.2), WRONG)
    _words(shared, 2.25, 1.62, "connection\nrefused", WRONG, 9)

    fresh.set_title("variable set: a new store per attempt", fontsize=11)
    _agents(fresh)
    _box(fresh, 0.0, 0.0, 2.05, 1.15, "none", "#999999", "--")
    closed = "store of the first\nattempt, closed\nwith old rank 0"
    _words(fresh, 1.02, 0.57, closed, "#666666", 9)
    _box(fresh, 2.4, 0.0, 2.1, 1.15, _GRAY, TRUTH)
    opened = "store of the second\nattempt, opened\nby new rank 0"
    _words(fresh, 3.45, 0.57, opened, TRUTH, 9)
    for x, to in ((1.0, 2.75), (3.5, 3.5)):
        _arrow(fresh, (x, 2.05), (to, 1.2), RANKS[2])
    return figure


def _agents(axes: Axes) -> None:
    for node, left in enumerate((0.0, 2.5)):
        middle = left + 1.0
        _box(axes, left, 2.1, 2.0, 2.3, _GRAY, TRUTH)
        _words(axes, middle, 4.12, f"node {node}", TRUTH, 11)
        count = "restarts counted: 1" if node else "restarts counted: 0"
        _words(axes, middle, 3.55, f"agent\n{count}", TRUTH, 9)
        _box(axes, left + 0.15, 2.25, 1.7, 0.85, RANKS[node] + "55", TRUTH)
        what = "killed," if node else "stopped,"
        _words(axes, middle, 2.67, f"rank {node}: {what}\nstarted again", TRUTH, 9)
    axes.set(xlim=(-0.1, 4.6), ylim=(-0.1, 4.5))
    axes.set_axis_off()


def _box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    face: str,
    edge: str,
    line: str = "-",
) -> None:
    style = "round,pad=0,rounding_size=0.1"
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle=style, fc=face, ec=edge, ls=line, lw=1
        )
    )


def _words(axes: Axes, x: float, y: float, text: str, color: str, size: int) -> None:
    axes.text(x, y, text, ha="center", va="center", color=color, fontsize=size)


def _arrow(
    axes: Axes, begin: tuple[float, float], end: tuple[float, float], color: str
) -> None:
    axes.annotate(
        "", end, begin, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.8}
    )
