"""Ranks below torchrun: forked or new, on one node or several, in `make lab` and `run_script`."""

import json
import os
import subprocess
import sys
import uuid

import pytest
from processes import LIMITS, all_gone, becomes, processes_with

from labkit.launch import nodes
from labkit.launch.forks import OF_THIS_PROCESS
from labkit.launch.guard import run_guarded
from labkit.launch.nodes import as_script
from labkit.launch.popen import run_forked
from labkit.launch.scripts import ScriptError, project_root, run_script

# What a rank can see


PROBE = """
import json, os, random, signal, sys
def annotated(number: int): pass
import numpy, torch

ends = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
seen = {
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "annotation": str(annotated.__annotations__),
    "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "ends": {name: str(signal.getsignal(getattr(signal, name))) for name in ends},
    "threads": torch.get_num_threads(),
    "rank": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
    "folder": os.path.isdir("labs"),
    "late": os.environ.get("SET_AFTER_THE_FORK_SERVER_STARTED"),
}
drawn = [torch.rand(1).item(), random.random(), numpy.random.random()]
print(json.dumps([seen, drawn]) + "\\n", end="", flush=True)
"""


def test_a_forked_rank_sees_what_a_fresh_one_sees_and_draws_numbers_of_its_own(script, monkeypatch):
    run_script(script("pass"), ranks=1)
    monkeypatch.setenv("SET_AFTER_THE_FORK_SERVER_STARTED", "yes")
    words = [script(PROBE), "--a", "b.py"]
    forked = sorted(map(json.loads, run_script(*words, ranks=2).splitlines()), key=str)
    of_rank_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    place = {"cwd": project_root(), "env": {**os.environ, **of_rank_1}}
    fresh = json.loads(run_guarded([sys.executable, *words], 300, **place).stdout)
    [seen] = [rank for rank, _ in forked if rank["rank"] == ["1", "1", "2"]]
    assert seen == fresh[0]
    assert seen["folder"]
    assert seen["late"] == "yes"
    assert seen["argv"] == ["labs/script.py", "--a", "b.py"]
    assert len({number for _, drawn in [*forked, fresh] for number in drawn}) == 3 * 3


def test_the_callers_process_need_not_load_torch():
    check = "import sys, labkit.launch.scripts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=300).returncode == 0


# How it ends


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise ValueError('the reason')", "ValueError: the reason"),
        ("import sys; sys.exit('the reason')", "the reason"),
    ],
)
def test_what_ends_one_forked_rank_is_said_and_ends_the_others(script, what, said):
    text = "import os, time\nif os.environ['RANK'] == '1':\n    " + what + "\ntime.sleep(600)\n"
    with pytest.raises(ScriptError) as caught:
        run_script(script(text), ranks=2)
    assert said in str(caught.value)
    assert "SignalException" not in caught.value.said
    assert "had not ended" not in str(caught.value)


def test_forked_ranks_that_end_well_end_the_run(script):
    text = "import os, sys\nprint('done\\n', end='', flush=True)\n"
    text += "sys.exit((None, 0, False)[int(os.environ['RANK'])])\n"
    assert run_script(script(text), ranks=3).count("done") == 3


def test_the_exit_code_of_several_agents_is_torchruns(script):
    with pytest.raises(ScriptError) as caught:
        run_script(script("raise SystemExit(3)\n"), ranks=1, nodes=2)
    assert caught.value.exit_code == 1  # torchrun's own, whatever a rank's
    assert "exitcode  : 3" in caught.value.said


@pytest.mark.parametrize("ranks", ["0", "-1", "abc", "1.5", "", "²", "٣"])
def test_a_number_of_ranks_that_is_none_is_refused_in_one_sentence(ranks, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nodes", "--nproc-per-node", ranks, "labs/none.py"])
    with pytest.raises(SystemExit, match=f"^{ranks!r} is no number of ranks: [^.]*[.]$"):
        nodes.main()


LAB = """
import os, sys
if os.environ["WORLD_SIZE"] != "1":
    if os.environ["RANK"] == "0":
        print("this lab has one rank, and not", os.environ["WORLD_SIZE"], *sys.argv[1:])
    sys.exit(3)
print("done with", *sys.argv[1:], os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.parametrize(
    ("ranks", "code", "said"),
    [(2, 3, "this lab has one rank, and not 2 --seed 7\n"), (1, 0, "done with --seed 7 1\n")],
)
def test_a_lab_is_the_only_one_to_speak_and_its_exit_code_is_handed_on(ranks, code, said, tmp_path):
    (tmp_path / "lab.py").write_text(LAB)
    words = [nodes.__file__, "--lab", "--nodes=1", f"--nproc-per-node={ranks}"]
    words += ["lab.py", "--seed", "7"]
    done = run_forked(OF_THIS_PROCESS, as_script, words, 300, tmp_path, dict(os.environ))
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")


# What is left behind: nothing


# A process that is found by the variable MARKER, and that no signal to its rank reaches.
DAEMON = "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)\n"


def test_a_run_leaves_no_process_of_a_rank_whether_it_ends_or_is_late(script, monkeypatch):
    run_script(script("pass"), ranks=1)  # starts the fork server, which outlives a run
    monkeypatch.setenv("MARKER", marker := uuid.uuid4().hex)
    assert run_script(script(DAEMON), ranks=2) == ""
    assert processes_with(marker) == []
    name = script(DAEMON + "import time; print('waiting', flush=True); time.sleep(300)")
    for limit in LIMITS:
        with pytest.raises(ScriptError, match=f"had not ended after {limit:g} s") as caught:
            run_script(name, ranks=2, timeout=limit)
        assert processes_with(marker) == []
        if "waiting" in str(caught.value):
            break
    assert "waiting" in str(caught.value)


# No rank takes the SIGINT that torch sends to those whose agent has ended.
WAITS = """
import os, signal, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_IGN)
Path(os.environ["MARKER"], os.environ["RANK"]).touch()
time.sleep(600)
"""
JOINS = "from labkit.launch.lab import join_ranks\n(ranks := join_ranks()).__enter__()\n"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["labkit.launch.nodes", "--nodes=2", "--nproc-per-node=1"], WAITS),
        (["torch.distributed.run", "--nproc-per-node=2"], JOINS + WAITS),
    ],
)
def test_a_command_that_is_killed_leaves_no_agent_and_no_rank(command, text, script, tmp_path):
    (seen := tmp_path / "seen").mkdir()
    words = [sys.executable, "-m", *command, script(text)]
    environment = {**os.environ, "MARKER": str(seen)}
    place = {"cwd": project_root(), "env": environment, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, **place) as process:
        assert becomes(lambda: len(list(seen.iterdir())) == 2, 300)
        process.kill()
    assert all_gone(str(seen))
