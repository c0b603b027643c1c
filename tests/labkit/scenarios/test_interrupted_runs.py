"""What a chapter shows of interrupted runs: no hash, no machine's name, every missing rank."""

import pytest

from labkit.launch.scripts import ScriptError
from labkit.scenarios import interrupted_runs as scenario
from labkit.scenarios.interrupted_runs import interrupted_runs, missing, shown


def test_the_hash_of_the_weights_is_not_shown():
    output = "step 11  loss 2.1\nweights 0123456789abcdef on 2 of 2 ranks"
    assert shown(output) == "step 11  loss 2.1\nweights (a hash) on 2 of 2 ranks"


def test_each_missing_rank_is_listed_once_without_its_machine():
    said = (
        'rank 0 on a waited in vain at "step 5: backward"\n'
        '  stuck: rank 1 on b, last seen at "step 5: its batch"\n'
        '  gone: rank 2 on c, last seen at "step 4: backward"\n'
        '  finished early: rank 4 on e, last seen at "step 3: backward"\n'
        'rank 3 on d waited in vain at "step 5: backward"\n'
        '  stuck: rank 1 on b, last seen at "step 5: its batch"\n'
    )
    assert missing(ScriptError("failed", said)) == [
        'finished early: rank 4, last seen at "step 3: backward"',
        'gone: rank 2, last seen at "step 4: backward"',
        'stuck: rank 1, last seen at "step 5: its batch"',
    ]


def test_a_run_that_hangs_instead_of_failing_is_not_the_failure_that_was_intended(monkeypatch):
    def hangs(script, *options, **launch):
        if "--stick" in options or "--lose-node" in options:
            raise ScriptError("stopped: it had not ended after 300 s", exit_code=None)
        return "weights 0123456789abcdef on 2 of 2 ranks"

    monkeypatch.setattr(scenario, "run_script", hangs)
    with pytest.raises(RuntimeError, match="did not fail as intended: stopped"):
        interrupted_runs()
