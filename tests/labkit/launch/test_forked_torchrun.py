"""Ranks that torchrun forks: what a script can see of the difference, which is to be nothing."""

import json
import sys

import pytest

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import ScriptError, project_root, run_script

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
    "names": sorted(name for name in os.environ if name.startswith("TORCHELASTIC_USE")),
}
drawn = [torch.rand(1).item(), random.random(), numpy.random.random()]
print(json.dumps([seen, drawn]) + "\\n", end="", flush=True)
"""


def test_a_forked_rank_sees_what_a_fresh_one_sees_and_draws_numbers_of_its_own(script):
    seen, drawn = {}, []
    for fresh in (False, True):
        lines = run_script(script(PROBE), "--a", "b.py", ranks=2, fresh=fresh).splitlines()
        ranks = sorted((json.loads(line) for line in lines), key=lambda rank: rank[0]["rank"])
        seen[fresh] = [rank[0] for rank in ranks]
        drawn += [number for rank in ranks for number in rank[1]]
    assert seen[False] == seen[True]
    assert seen[False][1]["rank"] == ["1", "1", "2"]
    assert seen[False][1]["argv"] == ["labs/script.py", "--a", "b.py"]
    assert len(set(drawn)) == 2 * 2 * 3


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
        run_script(script(text), ranks=2, timeout=100)
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


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "sys.exit(None or False)", "pass"])
def test_a_forked_rank_that_ends_well_ends_the_run(script, end):
    text = f"import sys\nprint('done\\n', end='', flush=True)\n{end}\n"
    assert run_script(script(text), ranks=2, timeout=60).count("done") == 2


def test_a_forked_agent_below_a_rank_is_an_agent(script, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run_script(script("print('here\\n', end='', flush=True)\n"), ranks=2).count("here") == 2


def test_started_without_a_number_of_threads_each_forked_rank_has_one(script, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = [sys.executable, "-m", "labkit.launch.forked_torchrun", "--standalone"]
    probe = script("import torch\nprint(f'{torch.get_num_threads()}\\n', end='', flush=True)\n")
    done = run_guarded([*command, "--nproc-per-node=2", probe], 100, cwd=project_root())
    assert done.stdout.split() == ["1", "1"], done.stderr
    # For one rank alone torchrun sets none.
    alone = run_guarded([*command, "--nproc-per-node=1", probe], 100, cwd=project_root())
    assert int(alone.stdout) >= 1, alone.stderr
