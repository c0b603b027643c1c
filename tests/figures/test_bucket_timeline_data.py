"""The measured steps in the bucket timeline's script are those of the stored results."""

import pytest
from figures.node import call

from labkit.launch.scripts import project_root
from labkit.scenarios.toy_steps import small_transformer, stack_of_linears
from miniddp.buckets import MIB
from timeline_data import SCRIPT, stored, written

MODELS = stored(project_root())["models"]
STACK = MODELS["stack"]
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


@pytest.mark.parametrize(
    "other", [{"w": 4}, {"gbit": 2}, {"latency": 0}, {"speed": 2}, {"cap": 3}, {"first": 0.5}]
)
def test_the_figure_shows_no_recorded_step_for_other_choices(other):
    [found] = call(
        "bucket_timeline", "recorded", [("stack", {**choices_of("stack", "1 MiB"), **other})]
    )
    assert found is None
