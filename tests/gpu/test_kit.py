"""The GPU kit on a machine without a GPU: what it says, and that its parts for GPUs run at all."""

import json
import subprocess
import sys
from unittest import mock

import pytest
import torch

from labkit.launch.guard import run_guarded
from labkit.launch.ranks import run_ranks
from labkit.launch.scripts import project_root
from tests.gpu import draws, equality, hooks, memory, precision, several, streams, timeline
from tests.gpu.__main__ import report
from tests.gpu.machine import Machine
from tests.gpu.parts import PARTS
from tests.gpu.pretended_gpu import pretended_gpu
from tests.gpu.proofs import CannotProveError, Evidence, Outcome, Part, exit_code, prove, show
from tests.gpu.training import distance

ROOT = project_root()
ONE, TWO, EIGHT = (Machine("cuda", ("H100",) * count) for count in (1, 2, 8))
REHEARSAL = Machine("cpu", ())


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return run_guarded([sys.executable, "-m", "tests.gpu", *options], 240, cwd=ROOT)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="is about a machine without a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    done = run()
    assert done.returncode == 2
    assert "There is no GPU that torch sees" in done.stdout


def test_a_rehearsal_says_that_it_proves_nothing_about_gpus(tmp_path) -> None:
    files = {"--json": tmp_path / "proofs.json", "--report": tmp_path / "report.md"}
    options = [str(word) for pair in files.items() for word in pair]
    done = run("--device", "cpu", "-k", "draws", "-k", "memory", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing in this table was proved on a GPU" in done.stdout
    proofs = json.loads(files["--json"].read_text())["proofs"]
    assert [proof[2:] for proof in proofs["draws"]][1] == ["rehearsed", "30 of 30 as printed"]
    assert [proof[2] for proof in proofs["memory"]] == ["not proved"]
    assert "30 of 30 as printed" in files["--report"].read_text()


def test_every_part_is_proved_or_says_what_it_lacks() -> None:
    for part in PARTS:
        lacking = Machine("cuda", ("H100",) * (part.gpus - 1))
        [proof] = prove(part, lacking)
        assert proof.outcome is Outcome.NOT_PROVED
        assert f"needs {part.gpus} GPUs, {part.gpus - 1} here" in proof.detail


@pytest.mark.parametrize("name", ["data-parallel", "overlap", "chapters", "pytorch-nccl", "memory"])
def test_what_a_cpu_cannot_even_rehearse_says_why(name) -> None:
    [proof] = prove(next(part for part in PARTS if part.name == name), REHEARSAL)
    assert proof.outcome is Outcome.NOT_PROVED
    assert proof.detail


def part(find) -> Part:
    return Part("name", "the claim", 1, find)


def test_evidence_counts_as_proved_on_a_gpu_and_as_rehearsed_on_a_cpu() -> None:
    good = part(lambda machine: iter([Evidence("what", "where", True, "")]))
    assert [proof.outcome for proof in prove(good, ONE)] == [Outcome.PROVED]
    assert [proof.outcome for proof in prove(good, REHEARSAL)] == [Outcome.REHEARSED]


def test_a_claim_that_does_not_hold_and_an_exception_are_both_failures() -> None:
    def find(machine):
        yield Evidence("first", "where", False, "7 wrong gradients")
        raise RuntimeError("CUDA error\nand more")

    proofs = list(prove(part(find), ONE))
    assert [proof.outcome for proof in proofs] == [Outcome.FAILED] * 2
    assert proofs[1].detail == "RuntimeError: CUDA error"
    assert exit_code({"name": proofs}) == 1
    assert "7 wrong gradients" in show({"name": proofs})


def test_a_run_that_proved_nothing_is_no_success() -> None:
    def find(machine):
        raise CannotProveError("no")
        yield

    proofs = list(prove(part(find), REHEARSAL))
    assert [proof.outcome for proof in proofs] == [Outcome.NOT_PROVED]
    assert exit_code({"name": proofs}) == 1


def test_ranks_share_one_gpu_over_gloo_and_have_their_own_over_nccl() -> None:
    assert [(g.ranks, g.label, g.exact) for g in ONE.groups()] == [
        (2, "2 ranks on one GPU, gloo", True),
        (1, "1 rank, NCCL", True),
    ]
    assert [group.ranks for group in TWO.groups()] == [2, 1]
    assert [(group.ranks, group.exact) for group in EIGHT.groups()] == [
        (8, False),
        (2, True),
        (1, True),
    ]
    assert EIGHT.pair().label == "2 ranks, 2 GPUs, NCCL"


def test_a_report_names_the_gpu_the_versions_the_command_and_the_numbers(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    proofs = {"part": list(prove(part(lambda m: iter([Evidence("a", "b", True, "7")])), ONE))}
    text = report(ONE, proofs, {"part": 3.0})
    for word in ("# What was proved on H100", "`make gpu`", torch.__version__, "2.27.3", "proved"):
        assert word in text


def test_a_missing_gradient_and_a_nan_are_infinitely_far_from_a_number() -> None:
    ones, nan = torch.ones(3), torch.full((3,), torch.nan)
    assert distance([ones], [ones]) == (True, 0.0)
    assert distance([ones, None], [ones, ones]) == (False, float("inf"))
    assert distance([nan], [ones]) == (False, float("inf"))
    assert distance([ones * 2], [ones]).relative == pytest.approx(1)


def test_a_part_of_communication_is_hidden_where_something_is_computed() -> None:
    computation = [(0.0, 4.0), (3.0, 5.0), (8.0, 9.0)]
    assert several.hidden_share([(1.0, 2.0)], computation) == 1
    assert several.hidden_share([(4.0, 8.0)], computation) == 0.25
    assert several.hidden_share([(4.0, 6.0), (5.0, 9.0)], computation) == pytest.approx(2 / 5)
    assert several.hidden_share([], computation) == 0


def test_a_copy_before_its_last_gradient_is_out_of_order() -> None:
    ready = [(1, 1.0), (0, 3.0)]
    late = [([1], (1.5, 2.0), (2.5, 2.6)), ([0], (3.1, 3.2), (3.3, 3.4))]
    early = [([1], (1.5, 2.0), (2.5, 2.6)), ([0], (2.9, 3.2), (3.3, 3.4))]
    assert timeline.in_order(timeline.Lanes(ready, late))
    assert timeline.overlaps(timeline.Lanes(ready, late))
    assert not timeline.in_order(timeline.Lanes(ready, early))
    assert not timeline.in_order(timeline.Lanes(ready, late[:1]))
    assert not timeline.overlaps(timeline.Lanes(ready, late[1:]))


def on_a_pretended_gpu(rank: int, world_size: int) -> dict[str, object]:
    """On each rank: what only a GPU runs, small, and in the program's order."""
    with (
        mock.patch.multiple(streams, WIDE=16, WIDTH=8),
        mock.patch.multiple(memory, LAYERS=2, WIDTH=8),
        mock.patch.multiple(several, WIDE=8, ROWS=4),
        mock.patch.dict(timeline.SIZES, cuda=(3, 8, 4)),
        pretended_gpu() as device,
    ):
        return {
            "order": streams.wrong_gradients(rank, device, views=False, waits=True),
            "order, views": streams.wrong_gradients(rank, device, views=True, waits=True),
            "no waits": streams.wrong_gradients(rank, device, views=False, waits=False),
            "side": streams.on_a_side_stream(rank, device, hooked=False),
            "side, hook": streams.on_a_side_stream(rank, device, hooked=True),
            "memory": memory.measure(rank, device),
            "hierarchical": hooks.refuses(device),
            "fp16": precision.by_the_wrapper(rank, world_size, device, "fp16"),
            "autocast": precision.by_autocast(rank, device),
            "draws": draws.apart(device)[0],
            "numbers": draws.printed_again(device, "none")[0],
            "lanes": timeline.in_order(timeline.record(rank, device)[0]),
            "ids": equality.compare(
                rank, world_size, device, "drop-in", equality.BY_IDS, ["mlp", "sparse embedding"]
            ),
            "overlap": several.profiled(rank, device, "MiniDDP"),
            "replicas": several.both_data_parallels(["cuda:0", "cuda:1"]),
        }


def test_what_only_a_gpu_runs_also_runs_on_a_pretended_one() -> None:
    for found in run_ranks(on_a_pretended_gpu, 2, timeout=200):
        assert found["order"] == found["order, views"] == found["no waits"] == 0
        assert found["side"] == found["side, hook"] == 0
        assert set(found["memory"]) == set(memory.WRAPPERS)
        assert found["hierarchical"] is False
        wide, to_one, to_torch = found["fp16"]
        assert wide
        assert max(to_one, to_torch) < precision.WITHIN["fp16"]
        assert found["autocast"][0]
        assert found["draws"] == len(draws.SEEDS) * (16 + 1024)
        assert found["numbers"] == 15
        assert found["lanes"]
        assert all(to_torch.bitwise for to_torch, _ in found["ids"].values())
        assert found["overlap"] == (0, 0.0)
        assert all(apart[0] < 1e-5 for apart in found["replicas"].values())
