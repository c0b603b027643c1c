"""For two_nodes.ipynb: four runs of the lab, started at once because each one is mostly
waiting; and a made-up job on 8 to 16,384 ranks, simulated.

    seconds = step_seconds(1024, "flat ring", plan)
    waiting = 1 - compute(1024).end / seconds

The job's model has 350 million float32 parameters in 96 equal gradients. A sample takes
12.5 ms in forward and 25 ms in backward. Four ranks of a node share one network card.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from tempfile import TemporaryDirectory
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from labkit.book.figures import RANKS, TRUTH, use
from labkit.launch.scripts import ScriptError, run_script
from labkit.profiling.cost_model import Backward, Link, ring, simulate, tree
from labkit.profiling.sweeps import backward_like

LAB = "labs/when_a_node_fails.py"

RANKS_PER_NODE = 4
BATCH = 16_384  # samples per step
FORWARD, BACKWARD = 0.0125, 0.025  # seconds per sample
GRADIENTS = [350_000_000 * 4 // 96] * 96  # bytes, in order of arrival
INSIDE = Link.of(gbit_per_s=1200, latency_us=3)
ACROSS = Link.of(gbit_per_s=400, latency_us=10)


class InterruptedRuns(NamedTuple):
    """The outputs of two finished runs, and the errors of two that failed by
    themselves.

    The code is not always 1: if a node is lost, it is the one of its killed agent.
    """

    uninterrupted: str
    killed: str
    stuck: ScriptError
    gone: ScriptError


def interrupted_runs(timeout: float = 3) -> InterruptedRuns:
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


def _flat_ring(world_size: int, nbytes: int) -> float:
    # A chunk travels all links in turn. One in RANKS_PER_NODE leads to another node, so
    # the mean latency counts; the slowest link sets the bandwidth.
    inside = INSIDE.latency * (RANKS_PER_NODE - 1)
    mean = Link((inside + ACROSS.latency) / RANKS_PER_NODE, ACROSS.seconds_per_byte)
    return mean.seconds(ring(world_size, nbytes))


def _tree(world_size: int, nbytes: int) -> float:
    return ACROSS.seconds(tree(world_size, nbytes))


def _hierarchical(world_size: int, nbytes: int) -> float:
    # A ring in each node, then rings across: the ranks of a node share its link, and
    # send together what one ring over the nodes would send.
    across = ACROSS.seconds(ring(world_size // RANKS_PER_NODE, nbytes))
    return INSIDE.seconds(ring(RANKS_PER_NODE, nbytes)) + across


ALL_REDUCES: dict[str, Callable[[int, int], float]] = {
    "flat ring": _flat_ring,
    "hierarchical": _hierarchical,
    "tree": _tree,
}


def compute(world_size: int, batch: int = BATCH) -> Backward:
    """What one of `world_size` ranks computes in a step of `batch` samples."""
    samples = batch / world_size
    return backward_like(GRADIENTS, samples * FORWARD, samples * BACKWARD)


def step_seconds(
    world_size: int,
    all_reduce: str,
    plan: Sequence[Sequence[int]],
    batch: int = BATCH,
    overlap: bool = True,
) -> float:
    """Simulated seconds of one step.

    Args:
        world_size: a multiple of `RANKS_PER_NODE`.
        all_reduce: a name of `ALL_REDUCES`.
        plan: the buckets of `GRADIENTS`, as `miniddp.buckets.arrival_plan` returns.
        batch: samples per step, of all ranks together.
        overlap: False launches all buckets after backward.

    Raises ValueError if the ranks do not fill whole nodes.
    """
    if world_size < RANKS_PER_NODE or world_size % RANKS_PER_NODE:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {RANKS_PER_NODE}: take a multiple"
        )
    cost = ALL_REDUCES[all_reduce]
    step = simulate(
        compute(world_size, batch),
        plan,
        lambda nbytes: cost(world_size, nbytes),
        overlap=overlap,
    )
    return step.end


def drawn(
    worlds: Sequence[int],
    seconds: Mapping[str, Sequence[float]],
    computing: Sequence[float],
) -> Figure:
    """Seconds per step against the number of ranks, a line per all-reduce."""
    use()
    figure, axes = plt.subplots()
    for color, (way, times) in zip(RANKS, seconds.items(), strict=False):
        axes.plot(worlds, times, "o-", color=color, ms=4, label=way)
    label = "computing alone"
    axes.plot(worlds, computing, "--", color=TRUTH, label=label)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds per step")
    axes.set_title("Simulated: one job on more and more ranks")
    axes.legend()
    return figure
