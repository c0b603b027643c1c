"""Journals of runs that never ran: what each rank would have written, from a few numbers."""

from typing import Any

from ddp_doctor.explain.equation import equation
from ddp_doctor.explain.findings import Finding
from ddp_doctor.explain.rules import examine
from ddp_doctor.facts.journal import Now, Pages
from ddp_doctor.facts.merged import Run

SAME = {"weight": 1.5, "bias": -2.0}
OWN = [{"weight": 1.0, "bias": -1.5}, {"weight": 2.0, "bias": -2.5}]


def window(
    counts: list[int],
    shares: list[float],
    gradients: dict[str, float],
    local: dict[str, float],
    **more: Any,
) -> dict[str, Any]:
    """One rank's record of one step with a micro-batch per count."""
    backwards = [
        {
            "place": "train.py:9",
            "scale": 1.0,
            "prepared": {"0": True},
            "wrappers": {"0": len(gradients)},
            "values": [1.0],
            "terms": [
                {
                    "function": "cross_entropy",
                    "reduction": "mean",
                    "count": count,
                    "rows": count,
                    "numel": count,
                    "place": "train.py:8",
                    "loss": True,
                    "factor": share,
                }
            ],
        }
        for count, share in zip(counts, shares, strict=True)
    ]
    hashes = {name: hash(value) for name, value in gradients.items()}
    return {
        "kind": "window",
        "n": 0,
        "optimizer": 0,
        "step": 1,
        "skipped": False,
        "backwards": backwards,
        "snapshot": {"grads": gradients, "hashes": hashes, "local": local, "missing": []},
        "after": {"parameters": {}, "values": {}, "buffers": {}},
        "stale": {"outside": 0, "anywhere": 2},
        "changed": [],
        "batch_norms": 0,
        "scaling": [],
        "clips": [],
        "collectives": [],
        "forwards": [],
        "inputs": [],
        "step_place": "train.py:10",
        **more,
    }


def run_of(windows: list[dict[str, Any]], **facts: list[dict[str, Any]]) -> Run:
    """A run with one window per rank. `facts` are appended to every rank's journal."""
    world = len(windows)
    pages = []
    for rank, one in enumerate(windows):
        lines = [
            {"kind": "process", "started": 0.0, "environment": {}},
            {"kind": "group", "rank": rank, "world": world},
            *facts.get("every", []),
            one,
            {"kind": "totals", "steps": {"0": 1}, "backwards": 1, "collectives": {}},
            {"kind": "end", "code": 0},
        ]
        pages.append(Pages(f"host-{rank}", lines, Now(0.0, 1, 1, True, "ended")))
    return Run.of(pages)


def findings(run: Run) -> dict[str, Finding]:
    found = {each.code: each for each in examine(run, equation(run))}
    assert not run.notes, run.notes  # a rule that fails says so here
    return found


def run_with_steps(steps: list[list[dict[str, Any]]], **facts: Any) -> Run:
    """A run of several steps: for each step, one window per rank."""
    run = run_of(steps[0], **facts)
    for number, windows in enumerate(steps[1:], start=1):
        for rank, one in zip(run.ranks, windows, strict=True):
            rank.facts["window"].append({**one, "n": number, "step": number + 1})
    return run


def step(**more: Any) -> list[dict[str, Any]]:
    """One right step on two ranks; a tuple in `more` holds one value per rank."""
    windows = []
    for rank, mine in enumerate(OWN):
        own = {key: one[rank] if isinstance(one, tuple) else one for key, one in more.items()}
        windows.append(window([4], [1.0], SAME, mine, **own))
        windows[-1]["backwards"][0]["values"] = [1.0 + rank]
    return windows
