"""Ranks below torchrun: forked or new, on one node or several, in `make lab` and `run_script`."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from processes import all_gone, becomes, processes_with

from labkit.launch import nodes
from labkit.launch.guard import run_guarded
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
    "names": sorted(name for name in os.environ if name.startswith("TORCHELASTIC_USE")),
}
drawn = [torch.rand(1).item(), random.random(), numpy.random.random()]
print(json.dumps([seen, drawn]) + "\\n", end="", flush=True)
"""


def test_a_forked_rank_sees_what_a_fresh_one_sees_and_draws_numbers_of_its_own(script, monkeypatch):
    run_script(script("pass"), ranks=1)
    monkeypatch.setenv("SET_AFTER_THE_FORK_SERVER_STARTED", "yes")
    seen, drawn = {}, []
    words = [script(PROBE), "--a", "b.py"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for fresh in (False, True):
        if fresh:
            said = run_guarded([*torchrun, *words], 300, cwd=project_root(), env=environment).stdout
        else:
            said = run_script(*words, ranks=2)
        lines = [line for line in said.splitlines() if line.startswith("[{")]
        ranks = sorted((json.loads(line) for line in lines), key=lambda rank: rank[0]["rank"])
        seen[fresh] = [rank[0] for rank in ranks]
        drawn += [number for rank in ranks for number in rank[1]]
    assert seen[False] == seen[True]
    assert seen[False][1]["rank"] == ["1", "1", "2"]
    assert seen[False][1]["folder"]
    assert seen[False][1]["late"] == "yes"
    assert seen[False][1]["argv"] == ["labs/script.py", "--a", "b.py"]
    assert len(set(drawn)) == 2 * 2 * 3


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


def test_a_forked_rank_that_is_killed_starts_anew_with_the_others(script):
    text = (
        "import os, signal\n"
        "life = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if life == '0' and os.environ['RANK'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print(f'life {life}\\n', end='', flush=True)\n"
    )
    output = run_script(script(text), ranks=2, max_restarts=1)
    assert output.count("life 1") == 2


def test_forked_ranks_that_end_well_end_the_run(script):
    text = "import os, sys\nprint('done\\n', end='', flush=True)\n"
    text += "sys.exit((None, 0, False)[int(os.environ['RANK'])])\n"
    assert run_script(script(text), ranks=3).count("done") == 3


def test_the_exit_code_of_several_agents_is_torchruns(script):
    with pytest.raises(ScriptError) as caught:
        run_script(script("raise SystemExit(3)\n"), ranks=1, nodes=2)
    assert caught.value.exit_code == 1  # torchrun's own, whatever a rank's
    assert "exitcode  : 3" in caught.value.said
    assert run_script(script("print('well')\n"), ranks=1, nodes=2) == "well\nwell"


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


def test_a_lab_that_fails_is_the_only_one_to_speak_and_its_exit_code_is_handed_on(tmp_path: Path):
    (tmp_path / "lab.py").write_text(LAB)
    command = [sys.executable, "-m", "labkit.launch.nodes", "--lab", "--nodes=1"]
    failed = run_guarded([*command, "--nproc-per-node=2", tmp_path / "lab.py", "--seed", "7"], 300)
    assert failed.returncode == 3
    assert failed.stdout == "this lab has one rank, and not 2 --seed 7\n"
    assert failed.stderr == ""
    done = run_guarded([*command, "--nproc-per-node=1", tmp_path / "lab.py", "--seed", "7"], 300)
    assert (done.returncode, done.stdout) == (0, "done with --seed 7 1\n")


# What is left behind: nothing


# A process that is found by the variable MARKER, and that no signal to its rank reaches.
DAEMON = "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)\n"


@pytest.fixture
def marker(script, monkeypatch):
    """The value of MARKER in every process that a script starts, and in no other."""
    run_script(script("pass"), ranks=1)  # starts the fork server, which outlives a run
    marker = uuid.uuid4().hex
    monkeypatch.setenv("MARKER", marker)
    return marker


def test_a_run_leaves_no_process_of_a_rank_whether_it_ends_or_is_late(script, marker):
    assert run_script(script(DAEMON), ranks=2) == ""
    assert processes_with(marker) == []
    name = script(DAEMON + "import time; print('waiting', flush=True); time.sleep(300)")
    with pytest.raises(ScriptError, match=r"(?s)had not ended after 15 s.*waiting"):
        run_script(name, ranks=2, timeout=15)
    assert processes_with(marker) == []


RANK_THAT_WAITS = """
import os, time
from pathlib import Path
from labkit.launch.lab import join_ranks

with join_ranks():
    Path(os.environ["MARKER"], os.environ["RANK"]).touch()
    time.sleep(600)
"""
WARM = (
    "from labkit.launch.scripts import run_script\nrun_script('labs/script.py', ranks=2, nodes=2)"
)
COMMANDS = {
    "make lab": ["-m", "labkit.launch.nodes", "--nodes=1", "--nproc-per-node=2", "labs/script.py"],
    "two new nodes": ["-m", "labkit.launch.nodes", "--nproc-per-node=1", "labs/script.py"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "labs/script.py"],
    "run_script on two nodes": ["-c", WARM],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_leaves_no_agent_and_no_rank(name, script, tmp_path):
    script(RANK_THAT_WAITS)
    (seen := tmp_path / "seen").mkdir()
    environment = {**os.environ, "MARKER": str(seen)}
    with subprocess.Popen(
        [sys.executable, *COMMANDS[name]],
        cwd=project_root(),
        env=environment,
        stderr=subprocess.DEVNULL,
    ) as command:
        ranks = 4 if name == "run_script on two nodes" else 2
        assert becomes(lambda: len(list(seen.iterdir())) == ranks, 300)
        command.kill()
    assert all_gone(str(seen))
