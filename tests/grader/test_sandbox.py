"""What code in a rank can see and do; and what is refused where there is no sandbox."""

import os
import subprocess
import sys
import tempfile

import numpy as np
import psutil
import pytest
from large_pages import ON_REQUEST, mib_in_large_pages

from grader import sandbox
from grader.ranks import run_group
from grader.sandbox import SandboxError, rank_server
from labkit.launch.scripts import project_root

CHECK = "def on_rank(student, given):\n    return student.look()\n"


def job(rank, ranks, source, link="routed"):
    """What a rank is asked: to return what `look` in `source` returns."""
    return {
        "call": "on_rank",
        "cells": [{"id": "look", "source": source}],
        "check": CHECK,
        "given": {"secret": np.arange(3) + rank},
        "rank": rank,
        "world_size": ranks,
        "seed": 0,
        "link": link,
        "torch_ddp": False,
        "meet": "../meet",
        "seconds": 3,
    }


def look(server, body, ranks=1):
    """What `body`, the inside of a function, returns on each rank."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = f"import ctypes, os, socket\nimport torch.distributed as dist\ndef look():\n{lines}"
    ends = run_group(server.address, [job(rank, ranks, source) for rank in range(ranks)]).ranks
    assert [end.how for end in ends] == ["returned"] * ranks, ends
    return [end.value for end in ends]


@pytest.mark.skipif(not ON_REQUEST, reason="needs Linux 6.1, and pages of 2 MiB on request")
def test_the_fork_server_in_the_sandbox_lies_in_large_pages(walls):
    look(walls, "return 1")  # it listens
    below = psutil.Process(walls.pid).children(recursive=True)
    assert max(mib_in_large_pages(process.pid) for process in below) > 50


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
        "others = [n for n in os.listdir('/proc') if n.isdigit() and int(n) != os.getpid()]\n"
        "return [network, others, "
        "os.listdir('..'), sorted(os.listdir('/dev/shm'))]",
        ranks=2,
    )
    for rank, (network, processes, folders, shared) in enumerate(found):
        assert not network
        assert processes == []
        assert folders == [f"rank-{rank}"]
        assert shared == []


def test_a_rank_has_an_environment_of_its_own(walls):
    [names] = look(walls, "return sorted(os.environ)")
    assert names == ["HOME", "OMP_NUM_THREADS", "PATH"]


def test_a_rank_holds_one_connection_and_no_other_descriptor(walls):
    [kinds] = look(
        walls,
        "import stat\n"
        "kinds = []\n"
        "for n in range(256):\n"
        "    try:\n"
        "        mode = os.fstat(n).st_mode\n"
        "    except OSError:\n"
        "        continue\n"
        "    other = 'null' if os.fstat(n).st_rdev else n\n"
        "    kinds.append('socket' if stat.S_ISSOCK(mode) else other)\n"
        "return sorted(kinds, key=str)",
    )
    assert kinds == ["null"] * 3 + ["socket"]


PR_GET_SECCOMP, PR_GET_NO_NEW_PRIVS, PR_CAPBSET_READ = 21, 39, 23


def test_a_rank_has_no_capability_and_no_way_to_one(walls):
    [(held, bounding, no_new, seccomp)] = look(
        walls,
        "import struct\n"
        "libc = ctypes.CDLL(None)\n"
        "header, data = struct.pack('Ii', 0x20080522, 0), ctypes.create_string_buffer(24)\n"
        "assert libc.capget(header, data) == 0\n"
        "held = sum(struct.unpack('6I', data.raw))\n"
        f"bounding = sum(libc.prctl({PR_CAPBSET_READ}, n, 0, 0, 0) == 1 for n in range(41))\n"
        f"no_new = libc.prctl({PR_GET_NO_NEW_PRIVS}, 0, 0, 0, 0)\n"
        f"return [held, bounding, no_new, libc.prctl({PR_GET_SECCOMP}, 0, 0, 0, 0)]",
    )
    assert (held, bounding, no_new, seccomp) == (0, 0, 1, 2)


ESCAPES = {
    "umount": "libc.umount2(b'/tmp', 2)",
    "mount": "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
    "a user namespace": "libc.unshare(0x10000000)",
    "a mount namespace": "libc.unshare(0x20000)",
    "clone with a user namespace": "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "setns": "libc.setns(0, 0)",
    "ptrace": "libc.ptrace(0, 0, 0, 0)",
    "chroot": "libc.chroot(b'/tmp')",
    "the session keyring": "libc.syscall(250, 0, -3, 1)",
    "a key": "libc.syscall(248, b'user', b'name', b'value', 5, -3)",
    "inotify": "libc.inotify_init()",
    "a lock on a shared file": "libc.flock(os.open(os.__file__, os.O_RDONLY), 2)",
    "a record lock": "__import__('fcntl').fcntl(0, 6, bytes(32))",
}


def test_no_system_call_by_which_a_rank_could_leave_succeeds(walls):
    calls = "".join(
        f"try:\n    found[{name!r}] = {call} >= 0\n"
        f"except (OSError, TypeError):\n    found[{name!r}] = False\n"
        for name, call in ESCAPES.items()
    )
    body = f"libc = ctypes.CDLL(None, use_errno=True)\nfound = {{}}\n{calls}return found"
    [found] = look(walls, body)
    assert found == dict.fromkeys(ESCAPES, False)


# Rank 0 leaves something, all meet, rank 1 looks for it; then the next group does.
LEAVE = """
left = []
for path in ('/tmp/left', '/dev/shm/left', '/var/tmp/left', '../left', '/dev/pts/left', '/left'):
    try:
        open(path, 'w').write('here')
        left.append(path)
    except OSError:
        pass
keep = []
try:
    s = socket.socket(socket.AF_UNIX)
    s.bind('\\0left')
    s.listen()
    t = socket.socket()
    t.bind(('127.0.0.1', 5555))
    t.listen()
    keep += [s, t]
except OSError:
    pass
libc = ctypes.CDLL(None)
libc.shmget(0x1234, 4096, 0o1666)
libc.msgget(0x1234, 0o1666)
libc.semget(0x1234, 1, 0o1666)
try:
    keep.append(os.open('/dev/ptmx', os.O_RDWR))
except OSError:
    pass
from multiprocessing import shared_memory
try:
    keep.append(shared_memory.SharedMemory('left', create=True, size=64))
except OSError:
    pass
"""
FIND = """
places = ('/tmp/left', '/dev/shm/left', '/var/tmp/left', '../left', '/left')
found = [path for path in places if os.path.exists(path)]
try:
    found += ['pty' for name in os.listdir('/dev/pts') if name.isdigit()]
except OSError:
    pass
for family, address in ((socket.AF_UNIX, '\\0left'), (socket.AF_INET, ('127.0.0.1', 5555))):
    with socket.socket(family) as s:
        s.settimeout(0.3)
        if s.connect_ex(address) == 0:
            found.append(str(address))
libc = ctypes.CDLL(None)
found += [name for name in ('shmget', 'msgget') if getattr(libc, name)(0x1234, 0, 0) >= 0]
found += ['semget'] if libc.semget(0x1234, 0, 0) >= 0 else []
found += [n for n in os.listdir('/proc') if n.isdigit() and int(n) != os.getpid()]
"""


def test_what_one_rank_leaves_no_other_rank_and_no_later_check_finds(walls):
    meeting = (
        "if dist.get_rank() == 0:\n"
        + "".join(f"    {line}\n" for line in LEAVE.strip().splitlines())
        + "dist.barrier()\n"
        + "if dist.get_rank() == 1:\n"
        + "".join(f"    {line}\n" for line in FIND.strip().splitlines())
        + "dist.barrier()\n"
        + "return found if dist.get_rank() == 1 else left"
    )
    left, found = look(walls, meeting, ranks=2)
    assert "/tmp/left" in left, "the trial itself worked"
    assert found == []
    assert look(walls, FIND.strip() + "\nreturn found") == [[]]


def test_a_checkout_below_tmp_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(sandbox, "_visible", lambda: ["/usr", "/tmp/someone/project/.venv"])
    said = r"/tmp/someone/project/.venv.*Move the checkout"
    with pytest.raises(SandboxError, match=said), rank_server():
        pass
    with rank_server(trust=True) as server:
        assert server.isolation == "none: trusted"


def test_nothing_is_run_without_a_sandbox_unless_told_so(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match="Install bubblewrap"), rank_server():
        pass


def test_a_server_that_cannot_be_started_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "_working_bubblewrap", list)
    monkeypatch.setattr(sandbox, "_in_the_open", lambda: ["/no/such/program"])
    with pytest.raises(FileNotFoundError, match="/no/such/program"), rank_server(trust=True):
        pass
    assert list(tmp_path.iterdir()) == []


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
        assert server.weakest(["a namespace per rank"]) == server.isolation


def test_ranks_in_the_sandbox_report_a_namespace_each_and_over_gloo_one_for_all(walls):
    assert walls.isolation == "bubblewrap, a namespace per rank"
    for link, isolation in (("routed", "a namespace per rank"), ("gloo", "a namespace per group")):
        jobs = [job(rank, 2, "def look():\n    return 1\n", link) for rank in range(2)]
        end = run_group(walls.address, jobs, link=link)
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
