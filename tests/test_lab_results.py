"""What the labs print: each one's numbers, once, on forked ranks, and what their options change."""

import json
import re
from itertools import pairwise

import pytest

from labkit.launch.scripts import run_script

ACCUMULATE = "labs/accumulate_vs_ddp.py"
NODE_FAILS = "labs/when_a_node_fails.py"
# 1. The puzzles --------------------------------------------------------------------------


def blocks(output: str) -> dict[str, list[list[str]]]:
    """{"equal on ranks 0–3": a parameter's three norms by row}, in the order of printing."""
    found: dict[str, list[list[str]]] = {}
    for line in output.splitlines():
        if re.fullmatch(r"(equal on )?ranks? [\d, –]+( of \d+)?", line):
            found[line] = rows = []
        elif line.startswith(("encoder.", "decoder.")):
            rows.append(line.split()[1:])
    return found


def test_unseeded_data_differ_between_ranks_and_runs_and_the_columns_do_not_agree():
    first, second = (blocks(run_script(ACCUMULATE, "--unseeded", ranks=2)) for _ in range(2))
    assert list(first) == list(second) == ["rank 0 of 2", "rank 1 of 2"]
    assert first != second
    accumulated, by_hand, ddp = (
        {norms[0][column] for norms in first.values()} for column in range(3)
    )
    assert [len(accumulated), len(by_hand), len(ddp)] == [2, 1, 1]


# The exit code of a lab is its verdict; chapters store what most of them print.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lab", "options", "ranks"),
    [
        ("accumulate_vs_ddp", ("--seed", "7"), 2),
        (
            "accumulate_vs_ddp_lightning",
            ("--version", "both-fixed", "--devices", "2", "--accumulate", "2"),
            None,
        ),
        ("bypassed_wrapper", ("--fix", "wrapper"), 2),
        ("bypassed_wrapper", ("--seed", "5", "--fix", "prepared"), 2),
        ("mean_of_means", ("--seed", "4"), 1),
        ("mean_of_means", ("--seed", "4"), 3),
        ("sum_or_average", ("--seed", "7"), 4),
        ("which_mean", ("--equal", "tokens", "--seed", "1"), 3),
        ("over_which_group", (), 4),
    ],
)
def test_a_lab_confirms_its_claims_with_other_seeds_and_ranks_too(lab, options, ranks):
    assert run_script(f"labs/{lab}.py", *options, ranks=ranks)  # otherwise its exit code is not 0


def rows_of_trainer(output: str) -> dict[str, list[str]]:
    """The numbers of both tables by what is before them in their row."""
    found = {}
    for line in output.splitlines():
        parts = re.split(r"  +", line.strip())
        numbers = [p for p in parts if re.fullmatch(r"\d+\.\d{3,4}", p)]
        if len(numbers) > 1:
            found[" ".join(parts[: -len(numbers)])] = numbers
    return found


FULL_BATCH = ("Llama", "GPT-2, first label ignored", "VisionEncoderDecoder, own loss")
FORMULAS = ("sum / N", "W · sum / N", "K · W · sum / N")


@pytest.mark.slow
def test_on_one_process_trainer_divides_by_the_window_where_the_model_lets_it():
    output = run_script("labs/mean_of_means_transformers.py")
    rows = rows_of_trainer(output)
    assert len(rows) == 19
    tokens, predicted = map(int, re.search(r", (\d+) tokens, (\d+) without", output).groups())
    for split, steps in (("16×1", 1), ("4×4", 4), ("1×16", 16)):
        for name in FULL_BATCH:
            ratio, cosine, logged, true = rows[f"{name} {split}"]
            assert (ratio, cosine) == ("1.000", "1.0000")
            assert float(logged) == pytest.approx(float(true), abs=2e-3)
        ratio, cosine, _, _ = rows[f"GPT-2 {split}"]
        assert float(ratio) == pytest.approx(predicted / tokens, abs=1e-3)
        assert cosine == "1.0000"
        ratio, cosine, logged, true = rows[f"VisionEncoderDecoder {split}"]
        assert float(ratio) == pytest.approx(steps, rel=0.1)
        assert (float(cosine) < 0.9999) == (steps > 1)
        assert float(logged) == pytest.approx(steps * float(true), rel=0.01)
    assert [rows[formula][0] for formula in FORMULAS] == ["0.2500", "0.2500", "1.0000"]


# 2. Speed and scale -------------------------------------------------------------------------------

AFTER = {"one all-reduce per parameter": 13, "flat": 1, "buckets": 6}
DURING = {"per parameter, overlapped": 13, "buckets, overlapped": 6, "MiniDDP": 6, "torch DDP": 6}


def rows_of_ways(output: str) -> dict[str, list[str]]:
    """The table's rows, {way: cells}; "12 of 12" is one cell."""
    lines = [line for line in output.splitlines() if " of 12 " in line]
    cells = [line.replace("  ", "\t").split("\t") for line in lines]
    return {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in cells}


def test_every_way_is_right_and_only_those_that_overlap_send_during_backward():
    small = ("--steps", 1, "--samples", 8, "--bucket-cap-mb", "1")
    rows = rows_of_ways(run_script("labs/buckets_that_overlap.py", *small, ranks=3))
    assert set(rows) == {*AFTER, *DURING}
    for name, (sent, first, *apart) in rows.items():
        assert apart[:3] == ["< 1e-05", "< 1e-05", "none"]
        if name in AFTER:
            assert (int(sent), first) == (AFTER[name], "12 of 12")
        else:
            assert int(sent) == DURING[name]
            assert first in ("1 of 12", "2 of 12")


@pytest.mark.slow
def test_with_torchs_caps_all_but_the_first_bucket_wait_for_the_end_of_backward(tmp_path):
    options = ("--steps", 1, "--gbit", 5, "--save", tmp_path)
    output = run_script("labs/buckets_that_overlap.py", *options, ranks=2)
    assert rows_of_ways(output)["torch DDP"][:2] == ["2", "2 of 12"]
    assert (tmp_path / "timeline.png").stat().st_size > 20_000
    assert len(list(tmp_path.glob("*.json"))) == len(AFTER) + len(DURING)
    events = json.loads((tmp_path / "torch-DDP.json").read_text())["traceEvents"]
    ready = [e["args"]["gradients_ready_at_launch"] for e in events if "all_reduce" in e["name"]]
    assert ready == [2, 12]
    per_parameter = (tmp_path / "per-parameter-overlapped.json").read_text()
    events = [e for e in json.loads(per_parameter)["traceEvents"] if e["ph"] == "X"]
    for row in {event["tid"] for event in events}:  # a viewer draws spans that overlap wrongly
        spans = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == row)
        assert all(a + length <= b + 1e-3 for (a, length), (b, _) in pairwise(spans))


def test_the_hierarchical_lab_counts_the_bytes_of_the_theory_and_sums_alike_on_all_ranks():
    output = run_script("labs/two_nodes.py", "--mib", "0.5", ranks=2, nodes=2)
    rows = {line.split("  ")[0]: line.split() for line in output.splitlines()}
    assert rows["hierarchical"][1] == "0.50"
    assert rows["flat ring"][2] == "0.75"
    assert rows["hierarchical"][-1] == rows["flat ring"][-1] == "yes"
    assert "theory of the bytes: 1.50 to 1" in output


def test_on_one_node_the_lab_says_that_nothing_leaves_it_and_how_to_start_two():
    output = run_script("labs/two_nodes.py", "--mib", "0.5", ranks=2)
    assert "no byte leaves it" in output
    assert "labkit.launch.nodes --nodes 2" in output
    assert not re.search("nan|theory", output)


@pytest.mark.parametrize("link", [(), pytest.param(("--gbit", 1), marks=pytest.mark.slow)])
def test_local_sgd_sends_one_hth_of_what_ddp_sends_and_equals_it_for_h_1(link):
    options = ("--rounds", 1, "--every", 1, 4, "--own-classes", *link)
    output = run_script("labs/less_often.py", *options, ranks=3)
    rows = [re.split(r"\s{2,}", line) for line in output.splitlines()[3:]]
    assert {name: (int(count), kb) for name, count, kb, *_ in rows} == {
        "torch DDP": (4, "3.232"),
        "local SGD, H = 1": (4, "3.232"),
        "DiLoCo, H = 1": (4, "3.232"),
        "local SGD, H = 4": (1, "0.808"),
        "DiLoCo, H = 4": (1, "0.808"),
    }
    assert [row[3] == "< 1e-05" for row in rows] == [True, True, False, False, False]


def steps_of(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)", output, re.MULTILINE)]


def weights_of(output: str) -> str:
    return re.search(r"^weights (\w{16}) on 4 of 4 ranks$", output, re.MULTILINE)[1]


@pytest.fixture(scope="module")
def unbroken() -> str:
    output = run_script(NODE_FAILS, ranks=4)
    assert steps_of(output) == list(range(12))
    return weights_of(output)


# The chapter kills rank 1.
@pytest.mark.slow
def test_the_rank_with_the_store_killed_changes_not_one_bit_of_the_weights(unbroken, tmp_path):
    arguments = ("--checkpoint", tmp_path / "a.pt", "--kill", "0@7")
    output = run_script(NODE_FAILS, *arguments, ranks=2, nodes=2, max_restarts=1)
    assert "resumed at step 4\n" in output
    assert steps_of(output) == [*range(7), *range(4, 12)]
    assert weights_of(output) == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["--forget-optimizer", "--rebuild-buckets"])
def test_without_the_optimizers_state_or_with_other_buckets_the_bits_differ(
    broken, unbroken, tmp_path
):
    arguments = ("--checkpoint", tmp_path / "a.pt", "--kill", "1@7", broken)
    output = run_script(NODE_FAILS, *arguments, ranks=4, max_restarts=1)
    assert "resumed at step 4\n" in output
    assert weights_of(output) != unbroken
