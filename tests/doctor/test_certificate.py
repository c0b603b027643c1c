"""The certificate: each verdict, measured on scripts whose truth is known."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor.harness.certify import certified
from doctor.harness.runs import QUIET, SOURCES, Server
from doctor.harness.scripts import STORED, Script, Stored, corpus
from processes import all_gone, becomes, processes_with

import ddp_doctor
from ddp_doctor.certificate.program import exit_code
from ddp_doctor.certificate.starts import OwnRanksError
from ddp_doctor.facts.certificate import Certificate
from labkit.launch.forks import ForkServer
from prove_it import prove

SCRIPTS = {script.name: script for script in corpus()}
NAMES = sorted(path.stem for path in STORED.glob("*.py") if path.stem != "start")


# What else a script's certificate has to say, besides what its first line says.
ALSO: dict[str, Callable[[dict[str, Any]], bool]] = {
    # What is behind a weight that starts at zero is compared.
    "behind_a_zero": lambda found: (
        found["worst"]["name"].startswith("deep.") and abs(found["worst"]["ratio"] - 2) < 1e-3
    ),
    # Frozen weights that a forward moves are put back, so another deal can be compared.
    "a_queue_that_a_constructor_draws": lambda found: (
        [row["verdict"] for row in found["properties"]] == ["equal"] * 4
    ),
    "a_parameter_of_integers": lambda found: "had no gradient" not in notes_of(found),
    # What is clipped by the norm of a part was combined before.
    "parameters_that_the_ranks_share_out": lambda found: any(
        "clips parameters of its own" in row["why"] for row in found["properties"]
    ),
    "parts_of_what_all_draw": lambda found: SAME not in notes_of(found),
}
SAME = "All ranks have the same samples"


def notes_of(found: dict[str, Any]) -> str:
    return "\n".join(found["notes"])


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_found_to_be_what_its_first_line_says(forks: ForkServer, name: str) -> None:
    stored = Stored.of(name)
    found = certified(forks, stored.script)
    assert found["verdict"] == stored.verdict.removesuffix(" if"), found
    assert stored.why in found["why"]
    assert name not in ALSO or ALSO[name](found), found
    if found["verdict"] == "equal":
        if_so = stored.verdict == "equal if"
        assert (found["error"], bool(found["condition"])) == ("", if_so), found["why"]


# Scripts of the corpus: what each is found to be, and a part of the reason or of a note.
FOUND = {
    "token_means": ("different", "0.318 : 0.682"),
    # Drawn samples, constants, and masks made row by row reach the one process.
    "own_sync_batchnorm": ("equal", ""),
    "clip_then_average": ("different", "clipped before the ranks' gradients are combined"),
    "fsdp2_own_clip": ("different", ""),  # each shard by a norm of its own
    # Hooks that are lost after the measured step.
    "half_precision_snapshot": ("different", "From optimizer step 3 (counted from 0) on"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_script_of_the_corpus_is_found_to_be_what_it_is_with_the_reason(
    forks: ForkServer, name: str
) -> None:
    certificate = certified(forks, SCRIPTS[name])
    verdict, text = FOUND[name]
    assert certificate["verdict"] == verdict, certificate
    assert text in f"{certificate['why']}\n{notes_of(certificate)}"


def test_a_loader_with_a_mean_is_equal_in_all_properties(forks: ForkServer) -> None:
    certificate = certified(forks, SCRIPTS["mean_loss"])
    verdicts = {row["name"]: row["verdict"] for row in certificate["properties"]}
    assert verdicts == dict.fromkeys(("P1", "P2", "P3", "later"), "equal")
    assert certificate["noise"] < 1e-5
    assert (certificate["loss_is_a"], certificate["condition"]) == ("mean", "")


def test_accumulation_in_one_process_is_judged_by_another_deal(forks: ForkServer) -> None:
    right = certified(forks, SCRIPTS["one_process"])
    means = SCRIPTS["one_process"].text.replace(
        'reduction="sum") / count', "ignore_index=-100) / accumulate"
    )
    wrong = certified(forks, replace(SCRIPTS["one_process"], text=means))
    assert (right["verdict"], wrong["verdict"]) == ("equal", "different")


def test_rules_look_at_the_number_of_micro_batches_which_no_run_measures() -> None:
    found = prove(Stored.of("three_micro_batches", **{"loss / 3": "loss"}).script.text)
    assert found.verdict == "equal"
    assert "The means of the micro-batches are added" in found.text


# What a right script is found to be once it is changed: its name, the changes, the verdict, and a
# part of the reason.
CHANGED: list[tuple[str, dict[str, str], str, str]] = [
    ("contrasts", {" + len(first) * dist.get_rank()": ""}, "different", ""),
    (
        "passes_divided_by_ranks",
        {"model(x), y)": 'model(x), y, reduction="sum")'},
        "not judged",
        "",
    ),
    ("sharded_after_meta", {"manual_seed(dist.get_rank())": "manual_seed(0)"}, "equal", SAME),
    # The line of what one process cannot join, and not a parameter's line.
    ("reshaped", {"update(model(": "update(dist.get_world_size() * model("}, "not judged", "LINE"),
    # Forks that seed nothing draw other samples.
    (
        "noise_in_other_shapes",
        {"torch.manual_seed(dist.get_rank() + 1)\n": "", "torch.manual_seed(0)\n": ""},
        "equal",
        "",
    ),
]


@pytest.mark.parametrize(("name", "changes", "verdict", "text"), CHANGED)
def test_a_script_that_is_changed_is_found_to_be_what_it_is_then(
    forks: ForkServer, name: str, changes: dict[str, str], verdict: str, text: str
) -> None:
    script = Stored.of(name, **changes).script
    found = certified(forks, script)
    assert found["verdict"] == verdict, found
    lines = [n for n, line in enumerate(script.text.splitlines(), 1) if "part = tokens" in line]
    text = f"train.py:{lines[0]} is one process's own" if text == "LINE" else text
    assert text in f"{found['why']}\n{notes_of(found)}"
    assert (SAME in notes_of(found)) == (text == SAME)


# Of the command.


@pytest.fixture
def lost_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script whose gradient is 1/W of the right one, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, value in (QUIET | {"PYTHONPATH": str(SOURCES)}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(SCRIPTS["token_sum_over_global_count"].text)
    return tmp_path


@pytest.mark.slow
def test_under_torchrun_rank_0_reports_and_the_exit_code_is_the_scripts(lost_factor: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = ["-m", "ddp_doctor", "--certify", "--json", "certificate.json", "train.py"]
    done = subprocess.run([sys.executable, *launch, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ddp-doctor certificate: SCALED, 2 ranks") == 1
    report = json.loads((lost_factor / "certificate.json").read_text())
    assert (report["certificate"]["version"], report["certificate"]["factor"]) == (2, "1/W")
    assert "missing_world_size_factor" in {finding["code"] for finding in report["findings"]}
    assert "SCALED" in (lost_factor / "ddp-doctor" / "report.txt").read_text()


@pytest.mark.parametrize(
    ("verdict", "error", "worst", "fail_on", "code"),
    [
        ("different", "", "error", None, 0),
        ("not judged", "", None, None, 0),
        ("not judged", "ValueError", None, None, 1),
        ("different", "", None, "error", 3),
        ("equal", "", "error", "error", 3),
        ("equal", "", "warning", "error", 0),
        ("not judged", "ValueError", None, "warning", 4),
    ],
)
def test_only_fail_on_makes_an_exit_code_of_the_verdict(
    verdict: str, error: str, worst: str | None, fail_on: str | None, code: int
) -> None:
    assert exit_code(Certificate(verdict, "", error=error), worst, fail_on) == code


@pytest.mark.slow
def test_a_test_of_ones_own_can_ask_for_the_certificate(lost_factor: Path) -> None:
    certificate = ddp_doctor.certify("train.py")
    assert (certificate.verdict, certificate.factor, certificate.world) == ("scaled", "1/W", 2)
    assert certificate == Certificate.of_json(certificate.as_json())


SLEEPS = "import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(600)\n"
OF_A_SCRIPT = "from ddp_doctor.testing import assert_certified\nassert_certified('sleeps.py')\n"
OF_FUNCTIONS = """
from ddp_doctor.testing import assert_certified
def make_model():
    import sleeps
def unused(*given):
    return []
if __name__ == "__main__":
    assert_certified(make_model=make_model, backward=unused, batches=unused)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "test"),
    [
        (["-m", "ddp_doctor", "--certify", "sleeps.py"], ""),
        (["test.py"], OF_A_SCRIPT),
        (["test.py"], OF_FUNCTIONS),
    ],
    ids=["a command", "a test of a script", "a test of functions"],
)
def test_neither_a_process_nor_a_folder_is_left_when_the_doctor_is_killed(
    command: list[str], test: str, tmp_path: Path
) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    (tmp_path / "test.py").write_text(test)
    # A short path: a server's socket lies below it.
    with tempfile.TemporaryDirectory(prefix="k") as temporary:
        marker = f"certificate-{os.getpid()}"
        environment = {"MARKER": marker, "TMPDIR": temporary, "PYTHONPATH": str(SOURCES)}
        with subprocess.Popen(
            [sys.executable, *command], cwd=tmp_path, env=os.environ | environment
        ) as doctor:
            assert becomes((tmp_path / "started").exists, within=300)
            assert len(processes_with(marker)) > 1
            assert list(Path(temporary).glob("ddp-doctor*"))
            doctor.kill()
        assert all_gone(marker)
        assert becomes(lambda: not list(Path(temporary).glob("ddp-doctor*")))


def test_a_script_without_the_launcher_that_it_expects_gets_the_command(
    server: Server, script: Callable[..., Script]
) -> None:
    text = 'import torch.distributed as dist\ndist.init_process_group("gloo")\n'
    outcome = server.run(script(text, ranks=1, launch="python"), doctor=True)
    assert outcome.codes == [1]
    assert re.search(r"torchrun --nproc-per-node 2 -m ddp_doctor \S+train.py", outcome.errors)


def test_ranks_that_start_ranks_are_refused_at_once(forks: ForkServer) -> None:
    script = Stored.of("results_that_the_main_process_waits_for").script
    with pytest.raises(OwnRanksError, match="the script starts its own ranks"):
        certified(forks, replace(script, launch="torchrun"))
