"""A part of the corpus, small enough for every change. `python -m surveys.doctor` runs it whole."""

import pytest
from doctor.harness.runs import Server
from doctor.harness.scripts import corpus

SCRIPTS = {script.name: script for script in corpus()}
BROKEN = (
    "accumulate_undivided",
    "clip_plain_gather",
    "sum_loss",
    "token_means",
    "token_sum_over_global_count",
)
CORRECT = ("gan", "masked_global_mean")


@pytest.mark.parametrize("name", [*BROKEN, *CORRECT])
def test_a_script_is_named_by_its_cause_or_runs_unchanged_and_gets_no_warning(
    server: Server, name: str
) -> None:
    script = SCRIPTS[name]
    looked = server.run(script, doctor=True)
    assert looked.report is not None, looked.errors
    findings = looked.report["findings"]
    if script.broken:
        assert script.expected <= {finding["code"] for finding in findings}
        return
    assert not {finding["severity"] for finding in findings} & {"error", "warning"}
    assert looked.report["measured"]
    assert not looked.differences(server.run(script, doctor=False))
    assert looked.steps, "no optimizer step was fingerprinted: nothing was compared"
