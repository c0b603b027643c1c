"""The mean of the means: the lab under torchrun, and what transformers and accelerate really do."""

import os
import re
import sys
from pathlib import Path

import pytest

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import ScriptError, project_root, run_script

LAB = "labs/mean_of_means.py"
LIBRARIES = "labs/mean_of_means_transformers.py"


@pytest.fixture
def shortly_trained(monkeypatch, tmp_path) -> Path:
    """A copy of the lab in a checkout that is the current folder; its model learns for one step."""
    text = (project_root() / LAB).read_text()
    assert text.count("trained_captioner()") == 1
    (tmp_path / "labs").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / LAB).write_text(text.replace("trained_captioner()", "trained_captioner(steps=1)"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / LAB


def rows_of(output: str) -> dict[str, list[str]]:
    """The lab's rows by variant and wrapper: ratio, cosine, and what is apart."""
    rows = re.findall(r"^(\S+) +(torch DDP|MiniDDP) +(\S+) +(\S+) +(.+)$", output, re.M)
    return {f"{variant} {wrapper}": figures for variant, wrapper, *figures in rows}


@pytest.mark.parametrize("lab", [LAB, LIBRARIES, "labs/buckets_that_overlap.py"])
def test_help_and_wrong_arguments_are_answered_before_torch_is_imported(lab, tmp_path):
    (tmp_path / "torch.py").write_text('raise ImportError("torch is imported")')
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    for option, code in (("--help", 0), ("--no-such-option", 2)):
        done = run_guarded([sys.executable, lab, option], 30, cwd=project_root(), env=environment)
        assert done.returncode == code, done.stderr
        assert "usage:" in done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_only_the_whole_steps_count_gives_the_full_batch_under_both_wrappers(ranks):
    output = run_script(LAB, "--seed", "4", ranks=ranks)
    assert "largest error of the loss that global_mean logs: < 1e-05" in output
    rows = rows_of(output)
    assert len(rows) == 6
    for wrapper in ("torch DDP", "MiniDDP"):
        assert rows[f"whole-step {wrapper}"] == ["1.0000", "1.0000", "< 1e-05"]
        assert float(rows[f"each-part {wrapper}"][1]) < 0.9999
        # The well-known fix is right on one rank, and on one only.
        right = rows[f"own-window {wrapper}"] == ["1.0000", "1.0000", "< 1e-05"]
        assert right == (ranks == 1)


def test_the_lab_fails_with_a_variant_that_is_wrong(shortly_trained):
    with pytest.raises(ScriptError, match="own-window does not give the gradient of the full"):
        run_script(LAB, "--variant", "own-window", ranks=2)


@pytest.mark.parametrize(
    ("right", "broken", "said"),
    [
        (
            "return [loss_scale(sum(counts), device=device)] * len(counts)",
            "return [loss_scale(sum(counts), device=device) / 2] * len(counts)",
            "whole-step does not give the gradient of the full batch",
        ),
        (
            "return global_mean(logged, sum(counts)).item()",
            "return (logged / sum(counts)).item()",
            "The logged loss is not the mean over all tokens",
        ),
        (
            "found = gradients(replica)",
            "found = [g + (torch.nan if place.rank else 0) for g in gradients(replica)]",
            "whole-step does not give the gradient of the full batch",
        ),
        (
            "return global_mean(logged, sum(counts)).item()",
            "return torch.nan",
            "The logged loss is not the mean over all tokens",
        ),
    ],
)
def test_a_lab_with_one_division_wrong_or_a_nan_fails(right, broken, said, shortly_trained):
    text = shortly_trained.read_text()
    assert right in text
    shortly_trained.write_text(text.replace(right, broken))
    with pytest.raises(ScriptError, match=said):
        run_script(LAB, "--accumulate", "2", ranks=2)


def test_other_captions_with_another_seed(shortly_trained):
    outputs = [run_script(LAB, "--seed", seed, "--accumulate", "1", ranks=1) for seed in (1, 2)]
    losses = [re.search(r"tokens is (\d\.\d+)", output)[1] for output in outputs]
    assert losses[0] != losses[1]


def library_rows(output: str) -> dict[str, list[str]]:
    """The figures of both tables by what stands before them in their row."""
    found = {}
    for line in output.splitlines():
        parts = re.split(r"  +", line.strip())
        figures = [p for p in parts if re.fullmatch(r"\d+\.\d{3,4}", p)]
        if len(figures) > 1:
            found[" ".join(parts[: -len(figures)])] = figures
    return found


def test_on_one_process_trainer_divides_by_the_window_where_the_model_lets_it():
    output = run_script(LIBRARIES)
    assert "average_tokens_across_devices is True by default" in output
    rows = library_rows(output)
    assert len(rows) == 19
    assert rows["Llama, last window 2×2"][:2] == ["1.000", "1.0000"]
    for split, steps in (("16×1", 1), ("4×4", 4), ("1×16", 16)):
        for name in ("Llama", "GPT-2, first label ignored", "VisionEncoderDecoder, own loss"):
            ratio, cosine, logged, true = rows[f"{name} {split}"]
            assert (ratio, cosine) == ("1.000", "1.0000")
            assert float(logged) == pytest.approx(float(true), abs=2e-3)
        ratio, cosine, _, _ = rows[f"GPT-2 {split}"]
        found = re.search(r"sequences, (\d+) tokens, (\d+) without", output)
        tokens, predicted = map(int, found.groups())
        assert float(ratio) == pytest.approx(predicted / tokens, abs=1e-3)
        assert cosine == "1.0000"
        ratio, cosine, logged, true = rows[f"VisionEncoderDecoder {split}"]
        assert float(ratio) == pytest.approx(steps, rel=0.1)
        assert (float(cosine) < 0.9999) == (steps > 1)
        assert float(logged) == pytest.approx(steps * float(true), rel=0.01)
    assert [rows[f][0] for f in ("sum / N", "W · sum / N", "K · W · sum / N")] == [
        "0.2500",
        "0.2500",
        "1.0000",
    ]


def test_on_two_processes_the_default_is_the_one_equation_and_without_it_the_ranks_count_alike():
    rows = library_rows(run_script(LIBRARIES, ranks=2))
    assert len(rows) == 13
    for name in ("Llama", "GPT-2, first label ignored", "VisionEncoderDecoder, own loss"):
        assert rows[f"{name} 4×2×2 yes"][:2] == ["1.000", "1.0000"]
        assert float(rows[f"{name} 4×2×2 no"][1]) < 0.9999
    with_flag, without = (rows[f"VisionEncoderDecoder 4×2×2 {flag}"] for flag in ("yes", "no"))
    assert float(with_flag[0]) == pytest.approx(4, rel=0.1)
    assert float(without[0]) == pytest.approx(2, rel=0.1)
    assert [rows[f][0] for f in ("sum / N", "W · sum / N", "K · W · sum / N")] == [
        "0.1250",
        "0.2500",
        "1.0000",
    ]


def test_on_three_processes_the_script_says_how_many_it_can_share_with():
    with pytest.raises(ScriptError, match="among 1, 2 or 4 processes, not 3"):
        run_script(LIBRARIES, ranks=3)
