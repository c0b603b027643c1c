"""Every lab explains itself, refuses what makes no sense, and fails if its numbers are wrong."""

import os
import re
import sys

import pytest
from in_process import run_in_process

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import ScriptError, project_root, run_script

ROOT = project_root()
ACCUMULATE = "labs/accumulate_vs_ddp.py"
LIGHTNING = "labs/accumulate_vs_ddp_lightning.py"
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.py", "benchmarks/*.py")
    for path in (ROOT / "labs").glob(pattern)
    if re.search(r"parse_arg(ument)?s\(", path.read_text())  # it has options
)

HELP_AND_A_WRONG_OPTION = """
import os, runpy, sys
for script in sys.argv[1:]:
    sys.path[0] = os.path.dirname(script)
    for option, code in (("--help", 0), ("--no-such-option", 2)):
        sys.argv = [script, option]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as leave:
            assert leave.code == code, (script, option, leave.code)
        else:
            raise AssertionError(f"{script} {option} did not exit")
    assert "torch" not in sys.modules, script
"""


def test_every_script_explains_itself_and_refuses_options_before_it_imports_torch():
    command = [sys.executable, "-c", HELP_AND_A_WRONG_OPTION, *SCRIPTS]
    done = run_guarded(command, 600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [script for script in SCRIPTS if f" {script}" not in done.stdout] == []
    assert done.stderr.count("error: unrecognized arguments: --no-such-option") == len(SCRIPTS)


FIRST_RANK_IS_SLOW = """
import argparse, os, time
from labkit.launch.arguments import parse_arguments
time.sleep(os.environ["RANK"] == "0")
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parse_arguments(parser)
"""


@pytest.fixture
def custom_lab(monkeypatch, tmp_path):
    """Write a lab into a checkout that is the current folder."""

    def write(script: str, text: str) -> None:
        (tmp_path / "labs").mkdir()
        (tmp_path / "pyproject.toml").touch()
        (tmp_path / script).write_text(text)
        monkeypatch.chdir(tmp_path)

    return write


def test_a_wrong_argument_is_named_once_even_if_the_first_rank_is_the_last_to_start(
    custom_lab,
):
    custom_lab(ACCUMULATE, FIRST_RANK_IS_SLOW)
    with pytest.raises(ScriptError, match="exit code 1") as caught:
        run_script(ACCUMULATE, "--seed", "no number", ranks=2)
    assert caught.value.said.count("error: argument --seed: invalid int value: 'no number'") == 1


@pytest.mark.parametrize(
    ("script", "environment", "said"),
    [
        (LIGHTNING, {"TORCHELASTIC_RUN_ID": "of torchrun"}, "without torchrun"),
        (ACCUMULATE, {}, r"start it with torchrun.*\n.*--nproc-per-node 4 labs/accumulate_vs_ddp"),
    ],
)
def test_a_lab_that_was_started_the_wrong_way_says_how_to_start_it(script, environment, said):
    ended = run_in_process(script, **environment)
    assert ended.code == 1
    assert re.search(said, ended.stderr)


@pytest.mark.parametrize(
    ("lab", "arguments", "ranks", "said"),
    [
        ("bypassed_wrapper", (), 3, r"has 2 ranks, not 3\. Start it with"),
        ("sum_or_average", (), 3, r"evenly among 3 ranks\. Start it on 1, 2, 4"),
        ("buckets_that_overlap", ("--gbit", "0"), 2, "needs a positive rate"),
        ("over_which_group", (), 2, r"has 4 ranks, not 2\. Start it with"),
        ("which_mean", ("--prompts", "1"), 3, r"use --prompts 3 or more"),
    ],
)
def test_ranks_and_values_that_a_lab_cannot_use_are_refused_in_words(lab, arguments, ranks, said):
    with pytest.raises(ScriptError, match=said):
        run_script(f"labs/{lab}.py", *arguments, ranks=ranks)


DDP = "    ddp(pixels, captions).backward()\n"
NAN_ON_RANK_1 = "    if rank == 1:\n        ddp.module.decoder.bias.grad.fill_(torch.nan)\n"
QUICK = ("trained_captioner()", "trained_captioner(steps=1)")
LOGGED = "return global_mean(logged, sum(counts)).item()"
FOUND = "found = gradients(replica)"
NAN_FOUND = "found = [g + (torch.nan if place.rank else 0) for g in gradients(replica)]"
WRAPPED = "wrapped = wrap(seeded_model(seed).to(device))"
NAN_UNDER_TORCH = """
    if wrap is DistributedDataParallel:
        wrapped.module[0].weight.register_hook(lambda g: g * torch.nan)"""
FINISH = f"{16 * ' '}self.averager.finish()\n"
TWO_ARE_OFF = f"""{FINISH}
                weight = self.module[0].weight.grad
                if type(self.averager) is Flat:
                    weight.mul_(1.001)  # on every rank alike
                if type(self.averager) is Bucketed:  # the last bit of one number
                    weight.view(-1)[0].mul_(1 + 2**-23 * dist.get_rank())
"""
MESH = "from miniddp.collectives.mesh import Mesh\n"
WHOLE_STEP = "whole-step does not give the gradient of the full batch"
APART = "accumulated and distributed gradients do not agree"

# A lab, changes to it, arguments, and what it says.
BROKEN = {
    "a NaN": ("accumulate_vs_ddp", [(DDP, DDP + NAN_ON_RANK_1)], (), APART),
    "a NaN on rank 1": ("mean_of_means", [QUICK, (FOUND, NAN_FOUND)], (), WHOLE_STEP),
    "a logged NaN": (
        "mean_of_means",
        [QUICK, (LOGGED, "return torch.nan")],
        (),
        "The logged loss is not the mean over all tokens",
    ),
    "a wrong variant": (
        "mean_of_means",
        [QUICK],
        ("--variant", "own-window"),
        "own-window does not give the gradient of the full",
    ),
    "one rank's count": (
        "which_mean",
        [],
        ("--way", "own window", "--equal", "tokens"),
        "one process for: SFT, DPO, GRPO, Dr. GRPO, DAPO, DAPO, per prompt, GSPO\n",
    ),
    "a NaN under torch's DDP": (
        "sum_or_average",
        [(WRAPPED, WRAPPED + NAN_UNDER_TORCH)],
        (),
        "not what one process does: mean loss, average",
    ),
    "two rungs": (
        "buckets_that_overlap",
        [(FINISH, TWO_ARE_OFF)],
        ("--steps", 1, "--samples", 8),
        "gradient of the full batch: flat, buckets\n",
    ),
    "a learning rate": (
        "in_pieces",
        [("Zero2Optimizer(model, SGD, **MOMENTUM)", "Zero2Optimizer(model, SGD, lr=0.2)")],
        (),
        "ZeRO-2 does not give the update of one process",
    ),
    "weights that are never averaged": (
        "less_often",
        [("return module, kind(inner, every, link)", "return module, inner")],
        ("--rounds", 1, "--every", 1, 2),
        "not what it should be: local SGD, H = 1; DiLoCo, H = 1; local SGD, H = 2",
    ),
    "no fix": (
        "bypassed_wrapper",
        [],
        ("--fix", "none"),
        r"Not every number is the one that the pull request printed.\n\nThe fixed replicas diverge",
    ),
    "gradients that are not summed": (
        "over_which_group",
        [(MESH, MESH + "Mesh.add_up = lambda *_: None\n")],
        ("--mesh", "context"),
        "not as expected: context: the rule",
    ),
    "a fix that is missing": (
        "accumulate_vs_ddp_lightning",
        [('"both-fixed": (False, True)', '"both-fixed": (True, True)')],
        ("--version", "both-fixed", "--devices", "2"),
        "does not agree with itself",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_lab_fails_if_its_numbers_do_not_agree_or_are_no_numbers(fault, custom_lab):
    lab, changes, arguments, said = BROKEN[fault]
    script = f"labs/{lab}.py"
    text = (ROOT / script).read_text()
    for right, broken in changes:
        assert right in text
        text = text.replace(right, broken)
    custom_lab(script, text)
    ranks = {"over_which_group": 4, "accumulate_vs_ddp_lightning": None}.get(lab, 2)
    with pytest.raises(ScriptError, match=said):
        run_script(script, *arguments, ranks=ranks)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lab", "LAB=no_such_lab"], "There is no labs/no_such_lab.py. There are:"),
        (["lab", "LAB=which mean"], "There is no labs/which mean.py. There are:"),
        (["lab", "LAB=accumulate_vs_ddp_lightning"], "starts its own ranks: .venv/bin"),
        (["lab", "LAB=programs/resume", "RANKS=٣"], "'٣' is no number of ranks"),
        (["serve", "PORT=abc"], "PORT is a whole number, and PORT=abc is not"),
        (["check", "WORKERS=two"], "WORKERS is a whole number, and WORKERS=two is not"),
        (["book", "PYTHON=python3", "-n"], "labkit.book.chapters execute"),
    ],
)
def test_make_explains_itself(arguments, said):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    done = run_guarded(command, 600, cwd=ROOT, env=environment)
    assert said in done.stdout + done.stderr
