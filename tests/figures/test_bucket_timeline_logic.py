"""What the bucket timeline computes and stores, against this project's functions and results."""

import random
from itertools import accumulate
from typing import Any

import pytest
from figures.node import call

from labkit.launch.scripts import project_root
from labkit.profiling.cost_model import Backward, Link, ring
from labkit.profiling.sweeps import limit_of_ring, simulate_ring
from labkit.scenarios.toy_steps import small_transformer, stack_of_linears
from miniddp.buckets import MIB, ParameterSize, arrival_plan, bucket_caps
from timeline_data import SCRIPT, stored, written

CASES = 700
NUMBERS = ("exposed", "limit", "flat", "linkBusy", "latencyShare")


def random_case(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A backward of up to 120 gradients, and choices beyond what the sliders allow."""
    count = rng.randint(1, 120)
    forward = rng.uniform(0, 0.5)
    gaps = [rng.choice([0.0, rng.uniform(0, 0.02)]) for _ in range(count)]
    backward = {
        "forward": forward,
        "ready": list(accumulate(gaps, initial=forward))[1:],
        "bytes": [round(2 ** rng.uniform(2, 25)) for _ in range(count)],
    }
    choices = {
        "w": rng.choice([1, 2, 3, 8, rng.randint(1, 20_000)]),
        "gbit": 10 ** rng.uniform(-2, 3),
        "latency": rng.choice([0, 10 ** rng.uniform(-1, 4)]),
        "cap": rng.choice([0, 0.25, 1, 4, 25, rng.uniform(0, 64)]),
        "first": rng.choice([None, 0, 1, rng.uniform(0, 8)]),
        "speed": rng.choice([1, 10 ** rng.uniform(-1, 1)]),
        "overlap": rng.random() < 0.85,
    }
    return backward, choices


RANDOM = random.Random(2)
RANDOM_CASES = [random_case(RANDOM) for _ in range(CASES)]


def in_python(backward: dict[str, Any], choices: dict[str, Any]) -> dict[str, Any]:
    """What the project's own functions say of a case, in the form of the figure's `predict`."""
    forward, nbytes = backward["forward"], backward["bytes"]
    ready = tuple(forward + (at - forward) / choices["speed"] for at in backward["ready"])
    computed = Backward(ready, tuple(nbytes))
    caps = [choices["cap"]] if choices["first"] is None else [choices["first"], choices["cap"]]
    sizes = [ParameterSize(one, "float32") for one in nbytes]
    everything = [list(range(len(nbytes)))]
    plan = everything
    if choices["overlap"]:
        plan = arrival_plan(sizes, range(len(sizes)), bucket_caps(caps))
    link, ranks = Link.of(choices["gbit"], choices["latency"]), choices["w"]
    step = simulate_ring(computed, plan, link, ranks, choices["overlap"])
    busy = sum(done - begun for _, begun, done in step.sent)
    pauses = (k for k in range(1, len(step.sent)) if step.sent[k][0] > step.sent[k - 1][2])
    return {
        "ready": list(ready),
        "plan": plan,
        "sent": [list(one) for one in step.sent],
        "bytes": [sum(nbytes[place] for place in bucket) for bucket in plan],
        "end": step.end,
        "critical": max(pauses, default=0),  # the link then works until the end
        "exposed": step.exposed,
        "limit": limit_of_ring(computed, link, ranks),
        "flat": simulate_ring(computed, everything, link, ranks, overlap=False).end,
        "linkBusy": busy,
        "latencyShare": len(plan) * link.seconds(ring(ranks, 0)) / busy if busy else 0,
    }


def flattened(predicted: dict[str, Any]) -> dict[str, Any]:
    step = predicted["step"]
    return {
        "ready": predicted["compute"]["ready"],
        "plan": predicted["plan"],
        "sent": [[one["launched"], one["begun"], one["done"]] for one in step["sent"]],
        "bytes": [one["bytes"] for one in step["sent"]],
        "end": step["end"],
        **{key: predicted[key] for key in ("critical", *NUMBERS)},
    }


def test_node_and_python_plan_and_simulate_the_same_steps():
    predicted = call("bucket_timeline", "predict", RANDOM_CASES)
    overlapping = 0
    for case, found in zip(RANDOM_CASES, predicted, strict=True):
        mine, wanted = flattened(found), in_python(*case)
        assert mine["plan"] == wanted["plan"], case
        assert mine["critical"] == wanted["critical"], case
        for key in ("ready", "bytes", "end", *NUMBERS):
            assert mine[key] == pytest.approx(wanted[key], rel=1e-9, abs=1e-9), (key, case)
        for one, other in zip(mine["sent"], wanted["sent"], strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-9), case
        overlapping += len(wanted["plan"]) > 1
    assert overlapping > CASES / 2  # the cases are not all of one bucket


# The measured steps ------------------------------------------------------------------------------

MODELS = stored(project_root())["models"]
LINK = {"w": 2, "gbit": 1, "latency": 50, "speed": 1}
WAYS = [(model, way) for model, kept in MODELS.items() for way in kept["ways"]]


def choices_of(model: str, way: str) -> dict[str, object]:
    """The figure's choices for which this way was measured."""
    caps = [cap / MIB for cap in MODELS[model]["ways"][way]["caps"]]
    first = caps[0] if len(caps) > 1 else None
    return {**LINK, "cap": caps[-1], "first": first, "overlap": way != "flat"}


def test_the_script_has_the_stored_results():
    script = (project_root() / SCRIPT).read_text()
    again = written(script, stored(project_root()))
    assert again == script, "run: python labs/benchmarks/timeline_data.py"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("stack", stack_of_linears),
        ("transformer", small_transformer),
        ("assumed", small_transformer),
    ],
)
def test_the_gradients_are_those_of_the_chapters_model(name, make):
    parameters = make().model.parameters()
    assert sorted(MODELS[name]["bytes"]) == sorted(one.nbytes for one in parameters)


def test_the_figure_finds_the_measured_step_of_every_way():
    cases = [(model, choices_of(model, way)) for model, way in WAYS]
    for (model, way), found in zip(WAYS, call("bucket_timeline", "recorded", cases), strict=True):
        step = MODELS[model]["ways"][way]
        assert found["way"] == way
        end = step["end"] if model == "transformer" else step["done"][-1]
        assert found["end"] == pytest.approx(1e-6 * end)
        assert [one["bytes"] for one in found["sent"]] == step.get("bytes", [])
        if "ready" in step:
            assert found["predicted"] == pytest.approx(from_its_compute(model, step, way != "flat"))


def from_its_compute(model: str, step: dict[str, list[int]], overlap: bool) -> float:
    """The end of the step, from the times at which its own gradients were ready."""
    sizes = [ParameterSize(nbytes, "float32") for nbytes in MODELS[model]["bytes"]]
    order = range(len(sizes))
    plan = arrival_plan(sizes, order, step["caps"]) if overlap else [list(order)]
    ready = tuple(1e-6 * one for one in step["ready"])
    backward = Backward(ready, tuple(MODELS[model]["bytes"]))
    return simulate_ring(backward, plan, Link.of(1, 50), 2, overlap).end


@pytest.mark.parametrize(
    "other", [{"w": 4}, {"gbit": 2}, {"latency": 0}, {"speed": 2}, {"cap": 3}, {"first": 0.5}]
)
def test_the_figure_shows_no_recorded_step_for_other_choices(other):
    [found] = call(
        "bucket_timeline", "recorded", [("stack", {**choices_of("stack", "1 MiB"), **other})]
    )
    assert found is None
