"""What code in a rank can see and do; and what is refused where there is no sandbox."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import psutil
import pytest

from grader import sandbox
from grader.ranks import run_group
from grader.sandbox import SandboxError, rank_server
from labkit.launch.scripts import project_root

CHECK = "def on_rank(student, given):\n    return student.look()\n"


def look(server, body, ranks=1):
    """What `body`, the inside of a function, returns on each rank."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = f"import os, socket\ndef look():\n{lines}"
    jobs = [
        {
            "call": "on_rank",
            "cells": [{"id": "look", "source": source}],
            "check": CHECK,
            "given": {"secret": np.arange(3) + rank},
            "rank": rank,
            "world_size": ranks,
            "seed": 0,
            "link": "routed",
            "torch_ddp": False,
            "museum": {},
            "meet": "../meet",
            "seconds": 3,
        }
        for rank in range(ranks)
    ]
    ends = run_group(server.address, jobs).ranks
    assert [end.how for end in ends] == ["returned"] * ranks, ends
    return [end.value for end in ends]


def test_a_rank_sees_no_assignment_no_key_and_no_home(walls):
    # The folder of the project itself may be there, for the environment that lies in it.
    paths = [str(project_root() / name) for name in ("labs", "src", "tests", "book", ".git")]
    paths += [os.path.expanduser("~/.bashrc"), "/etc/passwd", "/home", "/var"]
    [seen] = look(walls, f"return [path for path in {paths!r} if os.path.exists(path)]")
    assert seen == []
    [packages] = look(
        walls,
        "import importlib.util\n"
        "return [n for n in ('miniddp', 'labkit', 'grader.check') if importlib.util.find_spec(n)]",
    )
    assert packages == []


def test_a_rank_is_nobody_and_cannot_write_but_into_its_own_folder(walls):
    [found] = look(
        walls,
        "written = []\n"
        "for top in ('/', '/usr', '/opt/grader', '/dev', '/etc', os.path.dirname(os.__file__)):\n"
        "    try:\n"
        "        open(os.path.join(top, 'x'), 'w').close()\n"
        "        written.append(top)\n"
        "    except OSError:\n"
        "        pass\n"
        "open('own', 'w').close()\n"
        "return [os.getuid(), written]",
    )
    assert found[0] != 0
    assert found[1] == []


def test_a_rank_reaches_no_network_and_no_other_rank(walls):
    found = look(
        walls,
        "with socket.socket() as s:\n"
        "    s.settimeout(1)\n"
        "    network = s.connect_ex(('1.1.1.1', 53)) == 0\n"
        "pids = [p for p in range(1, 1000) if os.path.exists(f'/proc/{p}')]\n"
        "return [network, len(pids), os.listdir('..'), sorted(os.listdir('/dev/shm'))]",
        ranks=2,
    )
    for rank, (network, processes, folders, shared) in enumerate(found):
        assert not network
        assert processes <= 2, "its own, and the first of its namespace"
        assert folders == [f"rank-{rank}"]
        assert shared == []


def test_a_rank_has_an_environment_of_its_own(walls):
    [names] = look(walls, "return sorted(os.environ)")
    assert names == ["HOME", "OMP_NUM_THREADS", "PATH"]


def test_a_rank_holds_one_connection_and_no_other_file(walls):
    [kinds] = look(
        walls,
        "kinds = []\n"
        "for n in range(256):\n"
        "    try:\n"
        "        path = os.readlink(f'/proc/self/fd/{n}') if os.path.exists('/proc/self') else ''\n"
        "        os.fstat(n)\n"
        "        import stat\n"
        "        kinds.append(stat.S_ISSOCK(os.fstat(n).st_mode))\n"
        "    except OSError:\n"
        "        pass\n"
        "return sum(kinds)",
    )
    assert kinds == 1


def test_nothing_is_run_without_a_sandbox_unless_told_so(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match="Install bubblewrap"), rank_server():
        pass


def _without_walls_inside(monkeypatch):
    """A bubblewrap that starts, and ranks in it that nothing separates: as the open server's."""
    monkeypatch.setattr(sandbox, "_working_bubblewrap", lambda: ["bwrap"])
    monkeypatch.setattr(sandbox, "_contained", lambda bubblewrap: sandbox._in_the_open())


def test_ranks_that_cannot_be_separated_are_not_run_unless_told_so(monkeypatch):
    _without_walls_inside(monkeypatch)
    with pytest.raises(SandboxError, match="no rank gets a namespace of its own"), rank_server():
        pass


def test_what_is_less_than_a_namespace_a_rank_is_said_of_the_server_and_of_a_result(monkeypatch):
    _without_walls_inside(monkeypatch)
    with rank_server(trust=True) as server:
        assert server.isolation == "bubblewrap, and nothing between the ranks in it"
        assert server.weakest(["a namespace a rank"]) == server.isolation


def test_ranks_in_the_sandbox_report_a_namespace_each_and_over_gloo_one_for_all(walls):
    trial = {"call": "draw", "check": "def draw(rng):\n    return [{}]\n", "seed": 0}
    assert walls.isolation == "bubblewrap, a namespace a rank"
    for link, isolation in (("routed", "a namespace a rank"), ("gloo", "a namespace a group")):
        end = run_group(walls.address, [trial, trial], link=link)
        assert [rank.how for rank in end.ranks] == ["returned"] * 2
        assert end.isolation == isolation


def test_without_a_sandbox_the_results_say_so_and_nothing_is_left(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with rank_server(trust=True) as server:
        assert server.isolation == "none: trusted"
        leaving = (
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    os.execvp('sleep', ['sleep', '4321'])\n"
            "return 1"
        )
        assert look(server, leaving, ranks=2) == [1, 1]
        zygote = psutil.Process(server.pid)
        psutil.wait_procs(zygote.children(recursive=True), timeout=5)
        assert zygote.children(recursive=True) == []
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4321"]]
    assert left == []


def test_the_grader_imports_neither_torch_nor_miniddp():
    code = "import sys, grader.cli, grader.bench; print({'torch', 'miniddp'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
