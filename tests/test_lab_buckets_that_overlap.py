"""The lab of buckets that overlap, under torchrun: on one node, on two, and when it has to fail."""

import json

import pytest

from labkit.launch.scripts import ScriptError, project_root, run_script

ROOT = project_root()
LAB = "labs/buckets_that_overlap.py"
AFTER = {"one all-reduce per parameter": 13, "flat": 1, "buckets": 6}
DURING = {"per parameter, overlapped": 13, "buckets, overlapped": 6, "MiniDDP": 6, "torch DDP": 6}
PLANNED = "planned"
ONE_MIB = ("--bucket-cap-mb", "1")
SMALL = ("--steps", 1, "--samples", 8)


def rows_of(output: str) -> dict[str, list[str]]:
    """The table's rows, {way: cells}; "12 of 12" is one cell."""
    lines = [line for line in output.splitlines() if " of 12 " in line]
    cells = [line.replace("  ", "\t").split("\t") for line in lines]
    return {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in cells}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_way_is_right_and_only_those_that_overlap_send_during_backward(ranks):
    output = run_script(LAB, *SMALL, *ONE_MIB, ranks=ranks)
    rows = rows_of(output)
    assert set(rows) == {*AFTER, *DURING, PLANNED}
    assert f"{ranks} ranks" in output
    for name, (sent, first, truth, ddp, between, *times) in rows.items():
        assert (truth, ddp, between) == ("< 1e-05", "< 1e-05", "none")
        assert len(times) == 3
        assert all(float(time) >= 0 for time in times)
        if name in AFTER:
            assert (int(sent), first) == (AFTER[name], "12 of 12")
        elif name in DURING:
            assert int(sent) == DURING[name]
            assert first in ("1 of 12", "2 of 12")
    assert float(rows["torch DDP"][-2]) == 1.0


def test_with_torchs_caps_all_but_the_first_bucket_wait_for_the_end_of_backward(tmp_path):
    output = run_script(LAB, "--steps", 1, "--gbit", 5, "--save", tmp_path / "seen", ranks=2)
    assert rows_of(output)["torch DDP"][:2] == ["2", "2 of 12"]
    assert (tmp_path / "seen" / "timeline.png").stat().st_size > 20_000
    traces = {path.stem for path in (tmp_path / "seen").glob("*.json")}
    assert len(traces) == len(AFTER) + len(DURING) + 1
    events = json.loads((tmp_path / "seen" / "torch-DDP.json").read_text())["traceEvents"]
    ready = [e["args"]["gradients_ready_at_launch"] for e in events if "all_reduce" in e["name"]]
    assert ready == [2, 12]


def test_it_runs_on_two_nodes_as_it_is():
    output = run_script(LAB, *SMALL, ranks=2, nodes=2)
    assert output.count("4 ranks") == 1, "printed once, not once per node"
    assert all(row[2:5] == ["< 1e-05", "< 1e-05", "none"] for row in rows_of(output).values())
    assert PLANNED in rows_of(output)


def test_the_lab_fails_and_names_the_ways_that_are_wrong(monkeypatch, tmp_path):
    broken = {
        "Flat": "mul_(1.001)",  # on every rank alike
        "Bucketed": "view(-1)[0].mul_(1 + 2**-23 * dist.get_rank())",  # the last bit of one number
    }
    indent = 16 * " "
    finish = f"{indent}self.averager.finish()\n"
    change = "".join(
        f"{indent}if type(self.averager) is {rung}:\n"
        f"{indent}    self.module[0].weight.grad.{wrong}\n"
        for rung, wrong in broken.items()
    )
    source = (ROOT / LAB).read_text()
    assert source.count(finish) == 1
    (tmp_path / "labs").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / LAB).write_text(source.replace(finish, finish + change))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match="gradient of the full batch: flat, buckets\n"):
        run_script(LAB, *SMALL, ranks=2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(("--gbit", "0"), "needs a positive rate"), (("--steps", "0"), "0 is less than 1")],
)
def test_what_makes_no_sense_is_refused_in_words(wrong, said):
    with pytest.raises(ScriptError, match=said):
        run_script(LAB, *wrong, ranks=2, timeout=60)
