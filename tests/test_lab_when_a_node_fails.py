"""The lab of the chapter "When a node fails": each fault is survived, or the rank is named."""

import re

import pytest

from labkit.launch.scripts import ScriptError, run_script

RESUME = "labs/when_a_node_fails.py"
HASH = re.compile(r"^weights (\w{16}) on 4 of 4 ranks$", re.MULTILINE)


def steps_of(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def unbroken() -> str:
    output = run_script(RESUME, ranks=4)
    assert steps_of(output) == list(range(12))
    return HASH.search(output).group(1)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_killed_on_either_node_changes_not_one_bit_of_the_weights(rank, unbroken, tmp_path):
    arguments = ("--checkpoint", tmp_path / "a.pt", "--kill", f"{rank}@7")
    output = run_script(RESUME, *arguments, ranks=2, nodes=2, max_restarts=1)
    assert "resumed at step 4\n" in output
    assert steps_of(output) == [*range(7), *range(4, 12)]
    assert len(steps_of(output)) < 2 * 12
    assert HASH.search(output).group(1) == unbroken


@pytest.mark.parametrize("broken", ["--forget-optimizer", "--rebuild-buckets"])
def test_without_the_optimizers_state_or_with_other_buckets_the_bits_differ(
    broken, unbroken, tmp_path
):
    arguments = ("--checkpoint", tmp_path / "a.pt", "--kill", "1@7", broken)
    output = run_script(RESUME, *arguments, ranks=4, max_restarts=1)
    assert "resumed at step 4\n" in output
    assert HASH.search(output).group(1) != unbroken


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("--stick", 'stuck: rank 1 on {}, last seen at "step 5: its batch"'),
        ("--lose-node", 'gone: rank 1 on {}, last seen at "step 5: its batch"'),
    ],
)
def test_a_missing_rank_is_named_and_the_run_ends(fault, said):
    with pytest.raises(ScriptError) as caught:
        run_script(RESUME, fault, "1@5", "--timeout", "8", ranks=1, nodes=2, timeout=120)
    assert re.search(re.escape(said).replace(r"\{\}", r"\S+"), caught.value.said)
    assert caught.value.exit_code is not None, "it ended before the time limit"


def test_restarts_are_refused_where_ranks_would_read_stale_addresses(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    with pytest.raises(ScriptError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        run_script(RESUME, ranks=1, nodes=2, max_restarts=1, timeout=120)
