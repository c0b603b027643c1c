"""Recorded steps of a small model on two ranks, for comparison with simulated ones.

    python labs/benchmarks/recorded_steps.py [--rounds 15]

The stack of `labkit.scenarios.toy_steps` takes steps over a software link of 1 Gbit/s with a
latency of 50 µs: with one message after backward (`miniddp.ladder.Flat`), and with torch's DDP and
several bucket caps. Every way is recorded once per round, and its shortest step is kept, because
other programs only make a step longer.

The JSON has the gradients of the step without communication in backward (bytes, and
when each was ready on the slowest rank), and what rank 0 recorded of each way. All times are whole
microseconds since the start of the step. `simulated ms` in the table is computed from the times at
which that way's own gradients were ready, so the error comes from the network alone.
"""

import argparse
from functools import partial
from typing import Any

from benchmark_options import benchmark_parser
from labkit.launch.arguments import positive

if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    arguments = benchmark_parser(__doc__)
    arguments.add_argument(
        "--rounds", type=positive, default=15, help="rounds of all ways (default 15)"
    )
    ARGUMENTS = arguments.parse_args()

from labkit.profiling.cost_model import Backward, Link, backward_of
from labkit.profiling.recorded_ways import Way, record_ways, torch_ddp
from labkit.profiling.recording import RankRecording, Recording
from labkit.profiling.sweeps import simulate_ring
from labkit.scenarios.toy_steps import ToyStep, stack_of_linears
from labkit.tables import table
from miniddp.buckets import ParameterSize, arrival_plan, bucket_caps
from miniddp.ladder import Flat
from paired_timing import write_json

GBIT_PER_S, LATENCY_US, RANKS = 1, 50, 2
DEFAULT_CAPS = "torch's caps"
FLAT = "flat"
CAPS_MIB = (1, 2)  # besides torch's own
FLAGS = 100  # bytes: a message below carries flags, no gradient


def ways_to_record() -> dict[str, Way]:
    capped = {f"{cap} MiB": partial(torch_ddp, bucket_cap_mb=cap) for cap in CAPS_MIB}
    return {FLAT: Flat, DEFAULT_CAPS: torch_ddp, **capped}


def microseconds(seconds: float) -> int:
    return round(1e6 * seconds)


def length(step: Recording) -> float:
    return step.ranks[0].end - step.ranks[0].begin


def shortest_steps(toy: ToyStep, made: dict[str, Way], rounds: int) -> dict[str, Recording]:
    """The shortest recorded step of each way, of one per round."""
    shortest: dict[str, Recording] = {}
    for _ in range(rounds):
        recorded = record_ways(made, toy.model, toy.inputs, GBIT_PER_S, LATENCY_US)
        for name, one in recorded.items():
            kept = shortest.get(name, one.step)
            shortest[name] = min(kept, one.step, key=length)
    return shortest


def as_recorded(rank: RankRecording, cap_mib: int | None) -> dict[str, Any]:
    """One way's step as rank 0 saw it: bytes and microseconds of gradients and messages."""
    begin = rank.begin
    messages = [one for one in rank.buckets() if one.bytes >= FLAGS]
    return {
        "caps": list(bucket_caps(cap_mib)),
        "forward": microseconds(rank.forwards[0][1] - begin),
        "ready": [microseconds(one.ready - begin) for one in rank.gradients],
        "bytes": [one.bytes for one in messages],
        "after": [one.after for one in messages],
        "launched": [microseconds(one.launched - begin) for one in messages],
        "done": [microseconds(one.done - begin) for one in messages],
    }


def simulated_ms(backward: Backward, caps: list[int], overlap: bool) -> float:
    sizes = [ParameterSize(nbytes, "float32") for nbytes in backward.bytes]
    count = range(len(sizes))
    plan = arrival_plan(sizes, count, caps) if overlap else [list(count)]
    link = Link.of(GBIT_PER_S, LATENCY_US)
    return 1e3 * simulate_ring(backward, plan, link, RANKS, overlap).end


def main(given: argparse.Namespace) -> None:
    small = {"layers": 3, "width": 256, "samples": 16}
    toy = stack_of_linears(**small) if given.quick else stack_of_linears()
    steps = shortest_steps(toy, ways_to_record(), 1 if given.quick else given.rounds)
    backward = backward_of(steps[FLAT])
    caps = {FLAT: None, DEFAULT_CAPS: None, **{f"{cap} MiB": cap for cap in CAPS_MIB}}
    recorded = {way: as_recorded(step.ranks[0], caps[way]) for way, step in steps.items()}
    forwards = (rank.forwards[0][1] - rank.begin for rank in steps[FLAT].ranks)
    stack = {
        "bytes": list(backward.bytes),
        "forward": microseconds(max(forwards)),
        "ready": [microseconds(moment) for moment in backward.ready],
        "ways": recorded,
    }
    rows = []
    for way, step in recorded.items():
        measured = 1e-3 * step["done"][-1]
        simulated = simulated_ms(backward_of(steps[way]), step["caps"], way != FLAT)
        error = 100 * (simulated / measured - 1)
        rows.append([way, len(step["bytes"]), simulated, measured, error])
    headers = ["", "messages", "simulated ms", "recorded ms", "error, %"]
    print(f"{RANKS} ranks, {GBIT_PER_S} Gbit/s, {LATENCY_US} µs")
    print(table(headers, rows, digits=1))
    link = {"gbit_per_s": GBIT_PER_S, "latency_us": LATENCY_US, "ranks": RANKS}
    write_json(given.json, {"link": link, "stack": stack})


if __name__ == "__main__":
    main(ARGUMENTS)
