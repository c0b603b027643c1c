"""The recorded steps in the bucket timeline's script are those of the stored recording."""

import json

import pytest
from figures.node import call

from labkit.book.timeline_data import RECORDING, SCRIPT, written
from labkit.launch.scripts import project_root
from labkit.scenarios.toy_steps import small_transformer, stack_of_linears
from miniddp.buckets import MIB, ParameterSize, arrival_plan

RECORDED = json.loads((project_root() / RECORDING).read_text())
MODELS = {"stack": stack_of_linears, "transformer": small_transformer}
LINK = {"w": 2, "gbit": 1, "latency": 50, "speed": 1}
WAYS = [(model, way) for model, kept in RECORDED["models"].items() for way in kept["ways"]]


def choices_of(model: str, way: str) -> dict[str, object]:
    """The figure's choices for which this way was recorded."""
    caps = [cap / MIB for cap in RECORDED["models"][model]["ways"][way]["caps"]]
    first = caps[0] if len(caps) > 1 else None
    return {**LINK, "cap": caps[-1], "first": first, "overlap": way != "flat"}


def test_the_script_has_the_stored_recording():
    script = (project_root() / SCRIPT).read_text()
    assert written(script, RECORDED) == script, "run: python -m labkit.book.timeline_data"


def test_a_script_without_the_marked_lines_is_refused():
    with pytest.raises(ValueError, match="has 0 lines"):
        written("const DATA = {};", RECORDED)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_those_of_the_chapters_model(name):
    parameters = MODELS[name]().model.parameters()
    found = RECORDED["models"][name]["bytes"]
    assert sorted(found) == sorted(one.nbytes for one in parameters)


@pytest.mark.parametrize(("model", "way"), WAYS)
def test_torchs_ddp_sent_the_buckets_that_the_plan_has(model, way):
    kept = RECORDED["models"][model]
    step, sizes = kept["ways"][way], [ParameterSize(one, "float32") for one in kept["bytes"]]
    plan = [range(len(sizes))]
    if way != "flat":
        plan = arrival_plan(sizes, range(len(sizes)), step["caps"])
    planned = [sum(kept["bytes"][place] for place in bucket) for bucket in plan]
    if way == "flat":
        planned[-1] += 4 * len(sizes)  # it appends a flag per parameter
    assert step["bytes"] == planned


def test_the_figure_finds_the_recorded_step_of_every_way():
    cases = [(model, choices_of(model, way)) for model, way in WAYS]
    for (model, way), found in zip(WAYS, call("bucket_timeline", "recorded", cases), strict=True):
        step = RECORDED["models"][model]["ways"][way]
        assert found["way"] == way
        assert found["ready"] == pytest.approx([1e-6 * one for one in step["ready"]])
        assert found["end"] == pytest.approx(1e-6 * step["done"][-1])
        assert [one["bytes"] for one in found["sent"]] == step["bytes"]


@pytest.mark.parametrize(
    "other", [{"w": 4}, {"gbit": 2}, {"latency": 0}, {"speed": 2}, {"cap": 3}, {"first": 0.5}]
)
def test_the_figure_shows_no_recorded_step_for_other_choices(other):
    [found] = call(
        "bucket_timeline", "recorded", [("stack", {**choices_of("stack", "1 MiB"), **other})]
    )
    assert found is None


def test_the_assumed_model_is_spread_as_on_the_page():
    [backward] = call("bucket_timeline", "backwardOf", [("assumed",)])
    sizes = [one.nbytes for one in reversed(list(small_transformer().model.parameters()))]
    assert backward["bytes"] == sizes
    assert (backward["forward"], backward["ready"][-1]) == pytest.approx((0.08, 0.24))
