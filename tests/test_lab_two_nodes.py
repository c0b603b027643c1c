"""The lab of the chapter "Two nodes", and the thread's lab on two nodes."""

import re

from labkit.launch.scripts import run_script


def test_the_hierarchical_lab_counts_the_bytes_of_the_theory_and_sums_alike_on_all_ranks():
    output = run_script("labs/two_nodes.py", "--mib", "0.5", ranks=2, nodes=2)
    rows = {line.split("  ")[0]: line.split() for line in output.splitlines()}
    assert rows["hierarchical"][1] == "0.50"
    assert rows["flat ring"][2] == "0.75"
    assert rows["hierarchical"][-1] == rows["flat ring"][-1] == "yes"
    assert "theory of the bytes: 1.50 to 1" in output


def test_on_one_node_the_lab_says_that_nothing_leaves_it_and_how_to_start_two():
    output = run_script("labs/two_nodes.py", "--mib", "0.5", ranks=2)
    (headers,) = [line for line in output.splitlines() if "time ÷" in line]
    assert re.split(r"  +", headers.strip()) == ["MiB out of a node", "ms", "time ÷", "same bits"]
    assert "nan" not in output
    assert "no byte leaves it" in output
    assert "labkit.launch.nodes --nodes 2" in output
    assert "theory" not in output


def test_the_threads_table_is_the_same_on_two_nodes_as_on_one():
    ways = [{"ranks": 4}, {"ranks": 2, "nodes": 2}]
    one, two = (run_script("labs/accumulate_vs_ddp.py", **way) for way in ways)
    assert one == two
