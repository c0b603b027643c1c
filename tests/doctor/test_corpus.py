"""A part of the development corpus, small enough for every change; the score runs all of it."""

from pathlib import Path

import pytest
from doctor.corpus_runs import Script, Server

CORPUS = Path(__file__).parent / "corpus" / "development"
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


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_script_is_named_by_its_cause_and_runs_unchanged(
    server: Server, name: str
) -> None:
    script = Script.read(CORPUS / "broken" / f"{name}.py")
    looked, plain = server.run(script, doctor=True), server.run(script, doctor=False)
    assert looked.report is not None, looked.errors
    assert script.expected <= {each["code"] for each in looked.report["findings"]}
    assert looked.same(plain)
    assert looked.steps, "no optimizer step was fingerprinted: nothing was compared"


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_script_gets_no_error_and_no_warning(server: Server, name: str) -> None:
    script = Script.read(CORPUS / "correct" / f"{name}.py")
    looked, plain = server.run(script, doctor=True), server.run(script, doctor=False)
    assert looked.report is not None, looked.errors
    assert [f for f in looked.report["findings"] if f["severity"] != "note"] == []
    assert looked.report["equation"]["seen"]
    assert looked.same(plain)


def test_every_script_has_a_header_and_says_how_it_was_measured() -> None:
    paths = sorted(
        path for kind in ("broken", "correct") for path in CORPUS.parent.glob(f"*/{kind}/*.py")
    )
    assert len(paths) > 40
    for path in paths:
        Script.read(path)
        second = path.read_text().split("\n")[1]
        assert second.startswith("# measured: "), path
        assert "TODO" not in second, path
