"""`compare`: two commands from the same weights, and every input that cannot be compared."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddp_doctor.compare.commands import main

TRAIN = """
import sys
import torch

factor, first, shape = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = torch.nn.Linear(4, shape)
if "inner" in sys.argv:
    model = torch.nn.Sequential(model)
kind = torch.optim.Adam if "Adam" in sys.argv else torch.optim.SGD
optimizer = kind(model.parameters(), lr=0.1)
data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
for step in range(first, first + 5):
    optimizer.zero_grad()
    (model(data[8 * step : 8 * step + 8]).square().mean() * factor).backward()
    optimizer.step()
"""


def compared(folder: Path, first: str, second: str, *options: str) -> tuple[int, str]:
    """The exit code and the output; the temporary folder is empty afterward."""
    (folder / "train.py").write_text(TRAIN)
    temporary = folder / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "ddp_doctor", "compare", *options, first, second],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not list(temporary.iterdir())
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("first", "options", "said"),
    [
        ("exit 7", (), "Command A failed with exit code 7"),
        ("true", (), "Command A ended without a step of an optimizer"),
        ("echo 'OSError: EADDRINUSE'; exit 1", (), "Its port is taken"),
        ("sleep 600", ("--limit", "0.2"), "Command A did not take 3 steps in 0.2 s"),
        ("true", ("--names", "none.json"), "--names none.json cannot be read"),
        ("true", ("--steps", "0"), "--steps is 0"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    first: str,
    options: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main([*options, first, "true"]) == 4
    text = "".join(capfd.readouterr())
    assert said in text
    assert len(text.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "code", "said"),
    [
        ("1 0 3", 0, "EQUAL"),
        ("0.5 0 3", 3, "A's gradient is 2 times B's"),
        ("1 1 3", 4, "8 rows only in A"),
        ("0 0 3", 4, "the gradient is zero everywhere, so there is nothing to compare (command B)"),
        ("nan 0 3", 4, "the gradient of weight holds NaN or infinity (command B)"),
        ("1 0 2", 4, "has the shape [3, 4] in A and [2, 4] in B"),
        ("1 0 3 inner", 4, "A map of names can be given: --names"),
    ],
)
def test_a_comparison_says_what_was_measured(
    tmp_path: Path, second: str, code: int, said: str
) -> None:
    python = f"{sys.executable} train.py"
    found, text = compared(tmp_path, f"{python} 1 0 3", f"{python} {second}")
    assert said in text
    assert found == code


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "hidden"), [("SGD", False), ("Adam", True)])
def test_a_map_of_names_pairs_parameters_and_an_optimizer_that_hides_a_factor_is_named(
    tmp_path: Path, optimizer: str, hidden: bool
) -> None:
    (tmp_path / "names.json").write_text('{"0.weight": "weight", "0.bias": "bias"}')
    first, second = f"train.py 2 0 3 {optimizer}", f"train.py 1 0 3 inner {optimizer}"
    command = f"{sys.executable} {{}}"
    given = (command.format(first), command.format(second), "--names", "names.json")
    code, text = compared(tmp_path, *given)
    assert (code, "A's gradient is 2 times B's" in text) == (3, True)
    assert ("no effect on the updates of Adam" in text) == hidden
