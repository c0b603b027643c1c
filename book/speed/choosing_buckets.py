"""For choosing_buckets.ipynb: figures and tables of steps that are simulated, or stored
in labs/benchmarks/results.
"""

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.book import figures, table
from labkit.launch import project_root, run_ranks
from labkit.profiling import Link, Recorder, draw_together, sweeps
from labkit.profiling.cost_model import Backward, SimulatedStep
from labkit.profiling.recording import Collective, Gradient, RankRecording, Recording
from labkit.scenarios.toy_steps import loss_of, stack_of_linears
from miniddp.buckets import MIB

Plan = list[list[int]]
Times = Mapping[tuple[int, int], Mapping[float, float]]


def draw_caps(times: Times) -> None:
    """Step time ÷ best against the cap. `times`: (ranks, Gbit/s) → cap, MiB → ms."""
    figures.use()
    _, axes = plt.subplots(figsize=(6.4, 3.6))
    for (ranks, rate), color in zip(times, figures.RANKS, strict=True):
        ms = list(times[ranks, rate].values())
        ratios = [one / min(ms) for one in ms]
        axes.plot(ratios, color=color, label=f"{ranks} ranks, {rate} Gbit/s")
        axes.plot(ms.index(min(ms)), 1, "o", color=color, ms=7)
    caps = list(next(iter(times.values())))
    axes.set_xticks(range(len(caps)), ["each\nalone", *map(str, caps[1:])])
    label = "step time ÷ best, simulated"
    axes.set(xlabel="bucket_cap_mb", ylabel=label, ylim=(0.95, 1.8))
    axes.legend(loc="upper center")
    plt.show()


def table_of_caps(times: Times, messages: Sequence[int]) -> str:
    """`draw_caps` in numbers: a line per cap, with the number of messages per step."""
    columns = []
    for ms in times.values():
        best = min(ms.values())
        columns.append([f"{t:.0f} *" if t == best else f"{t:.0f}" for t in ms.values()])
    caps = map(str, next(iter(times.values())))
    rows = [list(row) for row in zip(caps, messages, *columns, strict=True)]
    headers = [f"{ranks} ranks, {rate} Gbit/s" for ranks, rate in times]
    return table(["cap, MiB", "messages", *headers], rows)


def drawn_measurements() -> Figure:
    """torch's DDP with five caps on a slow link, as labs/benchmarks has stored it."""
    stored = project_root() / "labs/benchmarks/results/step_time.json"
    cells = json.loads(stored.read_text())["cells"]
    models = ("wide MLP", "transformer", "600 small tensors")
    caps = [1, 2, 4, 8, 16]
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    for name, color in zip(models, figures.RANKS[:3], strict=True):
        seconds = cells[f"{name}, 2 ranks, 1gbit"]["seconds"]
        default = _calm(seconds["torch DDP"])
        ratios = [_calm(seconds[f"torch DDP, {cap} MiB"]) / default for cap in caps]
        axes.plot(range(len(caps)), ratios, "o-", color=color, label=name)
    axes.axhline(1, color=figures.TRUTH, ls="--", lw=1.5)
    axes.text(0, 1.015, "default caps", color=figures.TRUTH)
    axes.set_xticks(range(len(caps)), map(str, caps))
    axes.set(xlabel="bucket_cap_mb", ylabel="step time ÷ default", ylim=(0.6, 1.1))
    axes.legend(loc="lower right")
    return figure


def _calm(steps: Sequence[float]) -> float:
    """The median of the fastest quarter."""
    return median(sorted(steps)[: len(steps) // 4])


def draw_steps(
    steps: Mapping[str, Any], computed: Any, plans: Mapping[str, Plan], forward: float
) -> None:
    """One timeline per simulated step; `forward` is in seconds."""
    draw_together(
        {
            name: _as_recorded(step, computed, plans[name], forward)
            for name, step in steps.items()
        }
    )
    plt.show()


def _as_recorded(
    step: SimulatedStep, computed: Backward, plan: Plan, forward: float
) -> Recording:
    gradients = tuple(
        Gradient(str(place), *gradient)
        for place, gradient in enumerate(
            zip(computed.bytes, computed.ready, strict=True)
        )
    )
    sent = []
    for number, (bucket, (launched, _, done)) in enumerate(
        zip(plan, step.sent, strict=True)
    ):
        size = sum(computed.bytes[place] for place in bucket)
        last = 1 + max(bucket)
        sent.append(Collective("all_reduce", size, last, number, launched, done))
    spans = ((0.0, forward),)
    return Recording((RankRecording(0, 0.0, step.end, spans, gradients, tuple(sent)),))


def table_of_steps(
    steps: Mapping[str, Any], computed: Any, plans: Mapping[str, Plan], link: Link
) -> str:
    """A line per simulated step, and the least that any plan can take on two ranks."""
    flat = steps["flat"].end
    rows = []
    for name, step in steps.items():
        ms = 1e3 * step.end, 1e3 * step.exposed
        rows.append([name, len(plans[name]), *ms, step.end / flat])
    limit = sweeps.limit_of_ring(computed, link, 2)
    ms = 1e3 * limit, 1e3 * (limit - computed.end)
    rows.append(["limit", "", *ms, limit / flat])
    headers = ["simulated", "messages", "ms", "exposed ms", "÷ flat"]
    return table(headers, rows, digits=2)


def buckets_of_torch(options: Sequence[Mapping[str, Any]]) -> str:
    """The buckets of torch's DDP in its first three steps, per set of keywords."""
    stack, batch = stack_of_linears(samples=64)
    rows = []
    for keywords in options:
        of_steps = run_ranks(_first_steps, 2, stack, batch, keywords, device="cpu")[0]
        shown = [
            " ".join(f"{size / MIB:.0f}" for size in sizes) for sizes, _ in of_steps
        ]
        name = ", ".join(f"{key}={value}" for key, value in keywords.items())
        rows.append([name or "default", *shown, of_steps[-1][1]])
    headers = ["step 1, MiB", "step 2", "step 3", "step 3 overlaps"]
    return table(["torch DDP", *headers], rows)


def _first_steps(
    rank: int, model: nn.Module, inputs: Tensor, options: Mapping[str, Any]
) -> list[tuple[list[int], bool]]:
    """Per step: the bytes of its buckets, without messages of flags; its overlap."""
    recorder = Recorder(model)
    ddp = DistributedDataParallel(model, process_group=recorder, **options)
    found = []
    for _ in range(3):
        model.zero_grad()
        with recorder:
            loss_of(ddp(inputs.chunk(2)[rank])).backward()
        sizes = [one.bytes for one in recorder.recorded.buckets() if one.bytes >= 100]
        found.append((sizes, recorder.recorded.overlaps()))
    return found
