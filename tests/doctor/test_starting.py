"""Options, the script's own view of itself, ranks that a script spawns, and --fail-on."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_doctor import __main__ as program
from ddp_doctor.facts.journal import read
from ddp_doctor.observe.session import Session
from ddp_doctor.options import Options
from ddp_doctor.run.folders import SITE


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--every", "0"], "every is 0: it counts optimizer steps; pass 1 or more."),
        (["--first", "0"], "first is 0: it counts optimizer steps; pass 1 or more."),
        (["--hang-after", "-1"], "hang_after is -1.0: pass seconds"),
        (["--certify", "--ranks", "0"], "--ranks is 0: pass 1 to 256."),
        (["--certify", "--ranks", "100000"], "--ranks is 100000: pass 1 to 256."),
        (["--ranks", "2"], "--ranks goes with --certify"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_with_what_to_pass(
    option: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp_doctor", *option, "no_such_script.py"])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["-m", "train.py"], "train.py is a file, and -m takes the name of a module"),
        (["-m", "no_main"], "'no_main' is a package without a __main__.py"),
        (["-m", "no_main.train"], "there is no module 'no_main.train'"),
        (["-m", "sys"], "there is no module 'sys' with a file to run"),
        (["no_main/weights.py"], "weights.py is no Python that can be run"),
        (["--certify", "train.py"], ""),
    ],
)
def test_what_cannot_be_run_and_what_is_interrupted_ends_in_a_sentence(
    command: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    (tmp_path / "no_main").mkdir()
    (tmp_path / "no_main" / "__init__.py").touch()
    (tmp_path / "no_main" / "weights.py").write_bytes(b"\0")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(program, "start", lambda options: None)
    monkeypatch.setattr("ddp_doctor.certificate.program.run", interrupted)
    monkeypatch.setattr(sys, "argv", ["ddp_doctor", *command])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == (2 if said else "ddp-doctor: interrupted, without a certificate.")
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train.py"], ["-m", "package.train", "--lr", "1"]])
def test_a_script_and_a_module_are_run_as_python_runs_them(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("print(__file__)\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import sys\nfrom package import train\n"
        "print(__name__, __package__, __spec__.name, __file__, sys.argv)\n" * 2
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    program.run_script(words[0], words[1:])
    plain = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert capsys.readouterr().out == plain.stdout != ""


def test_a_process_that_looks_for_torch_before_it_imports_it_is_observed(tmp_path: Path) -> None:
    """Transformers does: a spawned rank that imports it first was never observed."""
    code = (
        "import importlib.util, os, sys\n"
        "assert importlib.util.find_spec('torch').loader is not None\n"
        "assert importlib.util.find_spec('torch').loader is not None\n"
        "import torch\n"
        "from ddp_doctor.run.start import _sessions\n"
        "print(_sessions[os.getpid()].run_folder, len(sys.meta_path))\n"
    )
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("DDP_DOCTOR")},
        "DDP_DOCTOR_RUN": str(tmp_path / "run"),
        "PYTHONPATH": os.pathsep.join([str(SITE), str(SITE.parents[1])]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(tmp_path / "run")), done.stderr


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A leader's session with --fail-on; there is no watcher."""
    monkeypatch.setattr(program, "VERDICT_AFTER", 0.2, raising=False)
    one = Session(Options(folder=str(tmp_path), fail_on="error"), tmp_path / "run")
    one.leads = True
    yield one
    one.close()


def test_fail_on_without_a_report_fails_and_says_so(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        program._close(session, session.options, None, 0)
    assert end.value.code == 4
    assert "--fail-on: not everything was checked: there is no report" in capsys.readouterr().err


def test_fail_on_fails_if_the_doctor_could_not_start(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        program._close(None, session.options, None, 0)
    assert end.value.code == 4
    assert "could not start" in capsys.readouterr().err
    program._close(None, Options(), None, 0)


def test_fail_on_keeps_the_scripts_own_exit_code(session: Session) -> None:
    program._close(session, session.options, None, 7)


def test_an_error_that_was_shown_before_is_not_the_runs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError(), raising=False)  # IPython sets it
    session.open()
    session.close()
    (page,) = read(session.run_folder)
    assert [fact["raised"] for fact in page.facts["end"]] == [False]


@pytest.mark.parametrize("optimizers", [1, 2, 60])
def test_later_steps_are_sampled_alike_however_many_optimizers_step_in_turn(
    optimizers: int, tmp_path: Path
) -> None:
    session = Session(Options(first=6, every=50), tmp_path)
    observed = []
    for _ in range(400 * optimizers):
        observed.append(session.observing)
        session.next_step(optimizers)
    assert sum(observed) == optimizers * (6 + 7)  # at the start, and at 50, 100, …, 350
    session.next_step(optimizers, full=True)
    assert not session.observing


def test_a_run_that_ends_after_its_first_steps_writes_what_is_only_known_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(Options(first=1, leave_after=1), tmp_path / "run")
    finished = []
    session.recorder = SimpleNamespace(finish=lambda: finished.append(True))  # type: ignore[assignment]
    monkeypatch.setattr(os, "_exit", lambda code: None)
    session.open()
    session.guard(lambda: session.next_step(1))()  # an observer of optimizer steps calls it
    assert finished == [True]
