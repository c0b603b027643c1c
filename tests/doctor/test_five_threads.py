"""The programs of the five threads, as the page shows them: the doctor names each cause."""

import ast
import json
from collections.abc import Callable, Iterator

import pytest
from doctor.corpus_runs import Outcome, Server, frameworks_of
from doctor.corpus_scripts import Script

from labkit.launch import project_root

PAGE = project_root() / "book" / "reference" / "ask_the_doctor.ipynb"


def programs() -> dict[str, str]:
    """The scripts that the page assigns to names in capitals."""
    found: dict[str, str] = {}
    for cell in json.loads(PAGE.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        for node in ast.parse("".join(cell["source"])).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                name = node.targets[0]
                if isinstance(name, ast.Name) and "\n" in str(node.value.value):
                    found[name.id] = str(node.value.value)
    return found


def ask(server: Server, one: Script) -> Outcome:
    # A busy machine may need a minute for a script that starts a second interpreter.
    outcome = server.run(one, doctor=True, timeout=180)
    assert outcome.codes == [0] * len(outcome.codes), outcome.errors
    assert outcome.report is not None, outcome.errors
    return outcome


def causes(outcome: Outcome) -> set[str]:
    assert outcome.report is not None
    return {one["code"] for one in outcome.report["findings"] if one["severity"] == "error"}


@pytest.mark.parametrize(
    ("program", "ranks", "expected"),
    [
        ("TRAIN", 2, {"unequal_denominators"}),
        ("BYPASSED", 2, {"wrapper_bypassed", "replicas_drift"}),
        ("BY_HAND", 2, set()),
        ("CAPTIONER", 1, {"unequal_denominators_accumulation"}),
        ("SUMMED", 2, {"own_reduction_sums"}),
    ],
)
def test_the_doctor_names_the_cause_in_a_threads_program(
    server: Server,
    script: Callable[..., Script],
    program: str,
    ranks: int,
    expected: set[str],
) -> None:
    text = programs()[program]
    assert len(text.splitlines()) <= 25
    assert causes(ask(server, script(text, ranks=ranks))) == expected


def test_all_reduces_by_hand_and_the_wrapper_have_the_same_equation(
    server: Server, script: Callable[..., Script]
) -> None:
    by_hand = programs()["BY_HAND"]
    wrapped = by_hand.replace(
        "model = nn.Linear(4, 3)", "model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))"
    ).replace("    average_gradients(model)\n", "")
    assert wrapped != by_hand
    equations = []
    for text in (by_hand, wrapped):
        outcome = ask(server, script(text))
        assert outcome.report is not None
        equations.append(outcome.report["equation"])
    for key in ("right", "world_size", "items", "combination", "weights"):
        assert equations[0][key] == equations[1][key]
    assert equations[0]["right"]


def test_the_planned_sum_is_w_times_the_average(
    server: Server, script: Callable[..., Script]
) -> None:
    summed = programs()["SUMMED"]
    averaged = summed.replace("model.register_comm_hook(None, total)\n", "")
    totals = []
    for text in (summed, averaged):
        report = ask(server, script(text)).report
        assert report is not None
        totals.append(report["equation"]["sum_of_weights"])
    assert totals == [pytest.approx(2), pytest.approx(1)]


@pytest.fixture(scope="module")
def with_its_framework() -> Iterator[Server]:
    """A rank server that has loaded what the two trainers are made with."""
    with Server(frameworks_of([programs()["TWO_TRAINERS"]])) as server:
        yield server


def test_two_trainers_in_one_script_are_told_apart_from_two_ranks(
    with_its_framework: Server, script: Callable[..., Script]
) -> None:
    one = script(programs()["TWO_TRAINERS"], ranks=1, launch="python")
    assert causes(ask(with_its_framework, one)) == {"world_size_one"}


def test_once_both_ranks_start_the_second_cause_is_named(
    with_its_framework: Server, script: Callable[..., Script]
) -> None:
    asked = programs()["TWO_TRAINERS"]
    without = asked.replace('fit(devices=1, strategy="ddp",', "fit(devices=1,")
    assert without != asked
    outcome = ask(with_its_framework, script(without, ranks=1, launch="python"))
    assert "datasets_differ" in causes(outcome)
    assert "world_size_one" not in causes(outcome)
