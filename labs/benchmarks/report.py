"""Tables and a figure of the race and of memory, and which goals were reached.

    python labs/benchmarks/report.py [FOLDER] [--figure FILE]

FOLDER (default: labs/benchmarks/results) holds step_time.json, memory.json, or both, which the
scripts of these names write with `--json`.

Two ratios are shown for each contender. The median over the rounds of its time divided by torch
DDP's time in the same round is reliable on an idle machine. On a busy machine, the *calm* ratio is
better: it compares the fastest quarter of the rounds of both.
"""

# ruff: noqa: E402
import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def arguments_of_this_benchmark() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the race there")
    return parser.parse_args()


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    ARGUMENTS = arguments_of_this_benchmark()

import matplotlib.pyplot as plt

from labkit.book.figures import RANKS, TRUTH, WRONG
from labkit.book.tables import table
from labkit.profiling.benchmark import paired_ratio, ratio_to_best

TORCH, OURS, FLAT = "torch DDP", "MiniDDP", "Flat"
DROP_IN, PLANNED = "drop-in", "MiniDDP, planned"
SHOWN = (FLAT, "PerParameter", "OverlappedPerParameter", "Bucketed", "BucketedOverlapped", OURS)
SHOWN += ("MiniDDP, views", DROP_IN, "drop-in, views", PLANNED)
SHOWN += (TORCH, "torch DDP, views", "torch DDP, our plan")

Cells = dict[str, dict[str, Any]]
Seconds = dict[str, list[float]]


def calm(seconds: Sequence[float]) -> float:
    """The median of the fastest quarter."""
    return statistics.median(sorted(seconds)[: max(1, len(seconds) // 4)])


def calm_limit(seconds: Seconds) -> float:
    """max(compute, t₁ + C), from calm times."""
    return max(calm(seconds["compute"]), calm(seconds["t1"]) + calm(seconds["C"]))


def best_swept(seconds: Seconds) -> str:
    """torch's DDP with the fastest cap in this cell."""
    return min((name for name in seconds if name.endswith(" MiB")), key=lambda n: calm(seconds[n]))


def plan_over_best_cap(seconds: Seconds) -> float:
    """torch's DDP with our plan ÷ torch's DDP with the fastest of its caps."""
    caps = {name: taken for name, taken in seconds.items() if name.endswith(" MiB")}
    return ratio_to_best(seconds["torch DDP, our plan"], caps)


def ratios(cells: Cells, quiet: bool) -> str:
    """One row per contender, one column per cell: its step divided by torch DDP's."""

    def ratio(seconds: Seconds, name: str) -> float:
        if quiet:
            return calm(seconds[name]) / calm(seconds[TORCH])
        return paired_ratio(seconds[name], seconds[TORCH])

    rows: list[list[Any]] = []
    measured = [name for name in SHOWN if all(name in c["seconds"] for c in cells.values())]
    for name in measured:
        rows.append([name, *(ratio(cell["seconds"], name) for cell in cells.values())])
    swept = {name: best_swept(cell["seconds"]) for name, cell in cells.items()}
    best = [ratio(cells[name]["seconds"], one) for name, one in swept.items()]
    rows.append(["torch DDP, best cap", *best])
    rows.append(
        [
            "the limit",
            *(calm_limit(c["seconds"]) / calm(c["seconds"][TORCH]) for c in cells.values()),
        ]
    )
    rows.append(
        ["torch DDP, ms", *(f"{1e3 * calm(c['seconds'][TORCH]):.0f}" for c in cells.values())]
    )
    rows.append(["best cap", *(one.removeprefix(f"{TORCH}, ") for one in swept.values())])
    return table(["", *(_short(name) for name in cells)], rows, digits=2)


def _short(cell: str) -> str:
    model, ranks, link = cell.split(", ")
    return f"{model.split()[0]} {ranks.split()[0]} {link}"


def reached(cells: Cells, memory: Cells) -> str:
    """The goals of the race, and what was measured, in calm ratios."""

    def over(name: str, base: str, where: str = "") -> dict[str, float]:
        return {
            cell: calm(of["seconds"][name]) / calm(of["seconds"][base])
            for cell, of in cells.items()
            if where in cell and name in of["seconds"]
        }

    parity = over(OURS, TORCH)
    slow, loop = over(PLANNED, TORCH, "1gbit"), over(PLANNED, TORCH, "loopback")
    to_limit = {
        cell: calm(of["seconds"][PLANNED]) / calm_limit(of["seconds"])
        for cell, of in cells.items()
        if "1gbit" in cell
    }
    to_best = {cell: plan_over_best_cap(of["seconds"]) for cell, of in cells.items()}
    lesson = {k: v for k, v in over(FLAT, PLANNED, "1gbit").items() if "small" not in k}
    small = over(OURS, TORCH, "600 small tensors")
    hooks = {k: v for k, v in small.items() if "loopback" in k}
    views = {k: v["steady"] for k, v in memory.items() if k.endswith("MiniDDP, views")}
    goals = [
        ("MiniDDP ÷ torch DDP, worst cell", parity, "≤", 1.03),
        ("drop-in ÷ torch DDP, worst cell", over(DROP_IN, TORCH), "≤", 1.03),
        ("planned ÷ torch DDP, 1 Gbit/s, worst", slow, "≤", 0.88),
        ("planned ÷ torch DDP, loopback, worst", loop, "≤", 1.00),
        ("torch DDP with our plan ÷ with its best cap, worst", to_best, "≤", 1.00),
        ("planned ÷ limit, 1 Gbit/s, worst", to_limit, "≤", 1.10),
        ("flat ÷ planned, 1 Gbit/s, wide and transformer, least", lesson, "≥", 1.30),
        ("600 small tensors, loopback: MiniDDP ÷ torch DDP, worst", hooks, "≤", 1.00),
        ("gradients + buckets with views ÷ parameters", views, "≤", 1.02),
    ]
    rows = [_worst(*goal) for goal in goals if goal[1]]
    if parity:
        median = statistics.median(parity.values())
        rows.insert(0, _goal("MiniDDP ÷ torch DDP, median of all cells", median, "≤", 1.00))
    return table(["ratio", "to reach", "measured", "reached", "in"], rows)


def _worst(name: str, found: dict[str, float], sign: str, goal: float) -> list[Any]:
    cell = (max if sign == "≤" else min)(found, key=found.__getitem__)
    return [*_goal(name, found[cell], sign, goal)[:-1], cell]


def _goal(name: str, value: float, sign: str, goal: float) -> list[Any]:
    met = round(value, 2) <= goal if sign == "≤" else round(value, 2) >= goal
    return [name, f"{sign} {goal:.2f}", f"{value:.2f}", met, ""]


def sizes(figures: dict[str, Any]) -> str:
    """A row for each model and wrapper, in multiples of the parameters' bytes."""
    columns = ("steady", "rebuild", "later")
    rows = [[name, *(cell.get(c, "") for c in columns)] for name, cell in figures["cells"].items()]
    headers = ["", "gradients + buckets", "peak of the rebuild", "peak of a later step"]
    return table(headers, rows, digits=2)


def draw_race(cells: Cells, path: Path) -> None:
    """One row of dots per cell: each contender's step divided by the limit."""
    contenders = {
        FLAT: (WRONG, "s"),
        TORCH: (TRUTH, "o"),
        "torch DDP, best cap": (TRUTH, "x"),
        OURS: (RANKS[0], "o"),
        PLANNED: (RANKS[2], "D"),
    }
    figure, axes = plt.subplots(figsize=(7.6, 1.2 + 0.36 * len(cells)), layout="constrained")
    for name, (color, marker) in contenders.items():
        found = [
            calm(s[best_swept(s) if name.endswith("best cap") else name]) / calm_limit(s)
            for s in (cell["seconds"] for cell in cells.values())
        ]
        rows = range(len(cells))
        axes.plot(found, rows, marker, color=color, label=name, markersize=6, alpha=0.85)
    axes.axvline(1, color=TRUTH, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(cells)), list(cells))
    axes.invert_yaxis()
    axes.set_xlabel("step ÷ max(compute, t₁ + C)")
    axes.set_title("No plan gets left of the dashed line", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)


def main(given: argparse.Namespace) -> None:
    paths = [given.folder / f"{name}.json" for name in ("step_time", "memory")]
    race, memory = (json.loads(p.read_text()) if p.exists() else {} for p in paths)
    if not race and not memory:
        names = " nor ".join(path.name for path in paths)
        raise SystemExit(f"{given.folder} holds neither {names}; run one of their scripts first")
    cells: Cells = race.get("cells", {})
    if cells:
        rounds = {len(cell["seconds"][TORCH]) for cell in cells.values()}
        print(
            f"{race['machine']}, {len(cells)} cells, {min(rounds)} to {max(rounds)} rounds each\n"
        )
        print(f"step ÷ torch DDP's, median of the paired ratios\n{ratios(cells, False)}\n")
        print(f"step ÷ torch DDP's, calm\n{ratios(cells, True)}\n")
        if given.figure:
            draw_race(cells, given.figure)
    print(f"{reached(cells, memory.get('cells', {}))}\n")
    if memory:
        print(f"memory.py: bytes ÷ parameter bytes\n{sizes(memory)}\n")


if __name__ == "__main__":
    main(ARGUMENTS)
