"""A part of the corpus, small enough for every change; `score.py` runs all of it."""

import pytest

from evaluation.doctor.runs import Server
from evaluation.doctor.scripts import corpus, variants

SCRIPTS = {script.name: script for script in corpus()}
BROKEN = (
    "accumulate_undivided",
    "hand_sum",
    "last_in_no_sync",
    "module_forward",
    "sum_loss",
    "token_means",
    "token_sum_over_global_count",
)
CORRECT = ("accumulate_no_sync", "gan", "masked_global_mean", "token_sum_times_world")


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
    assert looked.report["equation"]["seen"]
    assert not looked.differences(server.run(script, doctor=False))
    assert looked.steps, "no optimizer step was fingerprinted: nothing was compared"


BASE = "# doctor: expect=none ranks=2 launch=torchrun\n# measured: yes\na = 1\nb = 2\na = 1\n"


def test_a_variant_that_no_longer_fits_its_base_is_named_with_the_lines_it_looks_for() -> None:
    (variant,) = variants(BASE, "=== twice expect=unused_parameters ranks=4\n-b = 2\n+b = 3\n", "f")
    assert (variant.expected, variant.ranks) == ({"unused_parameters"}, 4)
    assert variant.text.endswith("a = 1\nb = 3\na = 1\n")
    for hunk, times in (("-a = 1\n+a = 0\n", 2), ("-c = 3\n", 0)):
        with pytest.raises(ValueError, match=f"f, variant x: the base has this {times} times"):
            variants(BASE, f"=== x\n{hunk}", "f")
