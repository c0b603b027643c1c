"""The figure and the trace of a recording, made up and real."""

import json
from itertools import pairwise

import matplotlib
import pytest

from labkit.profiling.recording import (
    Collective,
    Gradient,
    RankRecording,
    Recording,
    merge,
)
from labkit.profiling.timeline import save_trace

matplotlib.use("agg")
MIB = 2**20


@pytest.fixture
def recording() -> Recording:
    """Two ranks that differ; on each, bucket 1 waits for bucket 0, and is exposed."""

    def one(rank: int) -> RankRecording:
        late = 0.001 * rank
        return RankRecording(
            rank,
            begin=late,
            end=0.080,
            forwards=((0.002, 0.010),),
            gradients=(Gradient("b", 4, 0.020 + late), Gradient("a", 8, 0.040 + late)),
            collectives=(
                Collective("broadcast", 16, 0, None, 0.001, 0.0015),
                Collective("all_reduce", MIB, 1, 0, 0.021 + late, 0.050),
                Collective("all_reduce", 3 * MIB, 2, 1, 0.041 + late, 0.075),
            ),
        )

    return merge([one(1), one(0)])


def check_events(events: list[dict]) -> None:
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            continue
        assert event["ph"] in "Xi"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    lanes = {(event["pid"], event["tid"]) for event in events}
    for lane in lanes:  # a viewer draws spans of one thread that overlap wrongly
        here = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == lane]
        in_order = sorted(here, key=lambda event: event["ts"])
        for first, second in pairwise(in_order):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-6


def test_the_trace_holds_every_event_in_microseconds(recording, tmp_path):
    save_trace(recording, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_events(events)
    of_rank_1 = [event for event in events if event["pid"] == 1 and event["ph"] != "M"]
    assert [event["name"] for event in of_rank_1] == [
        *("forward", "backward", "b.grad", "a.grad"),
        *("broadcast", "all_reduce 0", "all_reduce 1", "exposed"),
    ]
    assert [event["tid"] for event in of_rank_1] == [0, 0, 0, 0, 1, 1, 2, 3]
    sent = of_rank_1[5]
    assert (sent["ts"], sent["dur"]) == (pytest.approx(22_000), pytest.approx(28_000))
    assert sent["args"] == {"bytes": MIB, "gradients_ready_at_launch": 1}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (rank, tid): name
        for rank in (0, 1)
        for tid, name in enumerate(("computes", "sends 1", "sends 2", "exposed"))
    }
