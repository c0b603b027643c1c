"""Tables and a figure of the race, and which goals were reached.

    python labs/benchmarks/race.py [FOLDER] [--figure FILE]

FOLDER (default: labs/benchmarks/results) holds step_time.json, which the script of this name writes
with `--json`.

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

from labkit.launch.arguments import explained_by

RESULTS = Path(__file__).parent / "results"


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the race there")
    ARGUMENTS = parser.parse_args()

import matplotlib.pyplot as plt

from labkit.book.figures import RANKS, TRUTH, WRONG
from labkit.tables import table
from paired_timing import paired_ratio

TORCH, OURS, FLAT = "torch DDP", "MiniDDP", "Flat"
DROP_IN = "drop-in"
SHOWN = (FLAT, "PerParameter", "OverlappedPerParameter", "Bucketed", "BucketedOverlapped", OURS)
SHOWN += ("MiniDDP, views", DROP_IN, "drop-in, views", TORCH, "torch DDP, views")

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
    limits = (calm_limit(c["seconds"]) / calm(c["seconds"][TORCH]) for c in cells.values())
    rows.append(["the limit", *limits])
    rows.append(
        ["torch DDP, ms", *(f"{1e3 * calm(c['seconds'][TORCH]):.0f}" for c in cells.values())]
    )
    rows.append(["best cap", *(one.removeprefix(f"{TORCH}, ") for one in swept.values())])
    return table(["", *(_short(name) for name in cells)], rows, digits=2)


def _short(cell: str) -> str:
    model, ranks, link = cell.split(", ")
    return f"{model.split()[0]} {ranks.split()[0]} {link}"


def reached(cells: Cells) -> str:
    """The goals of the race, and what was measured, in calm ratios."""

    def over_torch(name: str, where: str = "") -> dict[str, float]:
        return {
            cell: calm(of["seconds"][name]) / calm(of["seconds"][TORCH])
            for cell, of in cells.items()
            if where in cell and name in of["seconds"]
        }

    ours = over_torch(OURS)
    small = {k: v for k, v in over_torch(OURS, "600 small tensors").items() if "loopback" in k}
    goals = [
        ("MiniDDP ÷ torch DDP, worst cell", ours, 1.03),
        ("drop-in ÷ torch DDP, worst cell", over_torch(DROP_IN), 1.03),
        ("600 small tensors, loopback: MiniDDP ÷ torch DDP, worst", small, 1.00),
    ]
    median = statistics.median(ours.values())
    rows = [_goal("MiniDDP ÷ torch DDP, median of all cells", median, 1.00, "")]
    for name, found, goal in goals:
        if found:
            cell = max(found, key=found.__getitem__)
            rows.append(_goal(name, found[cell], goal, cell))
    return table(["ratio", "to reach", "measured", "reached", "in"], rows)


def _goal(name: str, value: float, goal: float, cell: str) -> list[Any]:
    return [name, f"≤ {goal:.2f}", f"{value:.2f}", round(value, 2) <= goal, cell]


def draw_race(cells: Cells, path: Path) -> None:
    """One row of dots per cell: each contender's step divided by the limit."""
    contenders = {
        FLAT: (WRONG, "s"),
        TORCH: (TRUTH, "o"),
        "torch DDP, best cap": (TRUTH, "x"),
        OURS: (RANKS[0], "o"),
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
    path = given.folder / "step_time.json"
    if not path.exists():
        raise SystemExit(
            f"{given.folder} holds no {path.name}: run step_time.py --json {path} first"
        )
    race = json.loads(path.read_text())
    cells: Cells = race["cells"]
    rounds = {len(cell["seconds"][TORCH]) for cell in cells.values()}
    print(f"{race['machine']}, {len(cells)} cells, {min(rounds)} to {max(rounds)} rounds each\n")
    print(f"step ÷ torch DDP's, median of the paired ratios\n{ratios(cells, False)}\n")
    print(f"step ÷ torch DDP's, calm\n{ratios(cells, True)}\n")
    print(f"{reached(cells)}\n")
    if given.figure:
        draw_race(cells, given.figure)


if __name__ == "__main__":
    main(ARGUMENTS)
