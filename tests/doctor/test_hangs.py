"""What is said about ranks that wait: in which calls, and for whom."""

from typing import Any

import pytest
from doctor.journals import journal_of

from ddp_doctor.explain.findings import Finding
from ddp_doctor.explain.rules.hangs import stuck
from ddp_doctor.facts.journal import Status
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import CALLS


def found(run: Run) -> list[Finding]:
    return list(stuck(run, []))


def run_of(
    doing: list[str],
    facts: dict[int, dict[str, Any]] | None = None,
    alive: tuple[int, ...] = (),
    hung: bool = False,
) -> Run:
    """A run with one rank per text in `doing`."""
    journals = []
    for rank, text in enumerate(doing):
        now = Status(0.0, 3, text == "ended", text)
        journals.append(journal_of(rank, len(doing), now, **(facts or {}).get(rank, {})))
    return Run.of(journals, {f"host-{rank}" for rank in alive}, hung)


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_waits_in_any_observed_call_is_named(call: str) -> None:
    run = run_of([f"{call} at train.py:7", "running"], alive=(0, 1), hung=True)
    (one,) = found(run)
    assert one.code == "hang_missing_rank"
    assert f"Rank 0 waits in {call} at train.py:7" in one.evidence


def test_different_shapes_are_a_mismatch_except_where_ranks_may_send_unequal_parts() -> None:
    def codes(call: str) -> list[str]:
        texts = [f"{call} of shape [{size}] at train.py:7" for size in (3, 4)]
        return [each.code for each in found(run_of(texts, alive=(0, 1), hung=True))]

    assert codes("all_reduce") == ["mismatched_collectives"]
    assert codes("reduce_scatter_tensor") == ["mismatched_collectives"]
    assert codes("all_to_all_single") == []
