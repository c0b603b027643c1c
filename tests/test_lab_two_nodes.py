"""The labs of the chapter "Two nodes": killed, stuck, gone, and ended all the same."""

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
def test_who_does_not_come_is_named_and_the_run_ends(fault, said):
    with pytest.raises(ScriptError) as caught:
        run_script(RESUME, fault, "1@5", "--timeout", "8", ranks=1, nodes=2, timeout=120)
    assert re.search(re.escape(said).replace(r"\{\}", r"\S+"), caught.value.said)
    assert "had not ended" not in str(caught.value)


def test_restarts_on_several_nodes_are_refused_where_the_ranks_would_miss_one_another(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    with pytest.raises(ScriptError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        run_script(RESUME, ranks=1, nodes=2, max_restarts=1, timeout=120)


def test_the_hierarchical_lab_counts_the_bytes_of_the_theory_and_sums_alike_on_all_ranks():
    output = run_script("labs/two_nodes.py", "--mib", "0.5", ranks=2, nodes=2)
    rows = {line.split("  ")[0]: line.split() for line in output.splitlines()}
    assert rows["hierarchical"][1] == "0.50"
    assert rows["flat ring"][2] == "0.75"
    assert rows["hierarchical"][-1] == rows["flat ring"][-1] == "yes"
    assert "theory of the bytes: 1.50 to 1" in output


def test_the_threads_table_is_the_same_on_two_nodes_as_on_one():
    ways = [{"ranks": 4}, {"ranks": 2, "nodes": 2}]
    one, two = (run_script("labs/accumulate_vs_ddp.py", **way) for way in ways)
    assert one == two
