"""One server for several processes: each gets forks of its own, and nothing is left of any."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from processes import all_end, becomes

from labkit.launch import forks
from labkit.launch.forks import (
    SHARED,
    ForkServer,
    NotStartedError,
    forked,
)
from labkit.launch.popen import ForkedPopen

# These tests need no torch in the server: it starts at once.
BARE = "from labkit.launch import fork_server; fork_server.LOADED = ()\n"
MAKER = f"""
import os, psutil, sys
from labkit.launch import forks
from labkit.launch.forks import SHARED, shared_server
forks._SERVER = {BARE!r} + forks._SERVER
if hasattr(os, "SCHED_OTHER"):
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # pytest's own is inherited
with shared_server():
    print(os.environ[SHARED], psutil.Process().children()[0].pid, flush=True)
    sys.stdin.read()
"""
IN_A_FORK = """
import os, subprocess, sys, time
from labkit.launch.forks import start_forked

def double(caller, number):
    caller.send(2 * number)

def describe(caller):
    os.write(2, b"to standard error")
    caller.send((os.getcwd(), os.environ.get("GIVEN"), os.sched_getscheduler(0)))

def say(words):
    print(words, end="")
    print("an error", end="", file=sys.stderr)
    sys.exit(3)

def wait(words):
    open("waits", "w").close()
    time.sleep(300)

def start_others(caller):
    start_forked(time.sleep, 300)
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    caller.send("started")
    caller.recv()
"""


class Maker:
    """A process inside `shared_server`."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", MAKER]
        environment = {name: value for name, value in os.environ.items() if name != SHARED}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, env=environment, text=True)
        self.value, pid = self.process.stdout.readline().split()
        self.server = psutil.Process(int(pid))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def maker() -> Iterator[Maker]:
    maker = Maker()
    yield maker
    maker.process.communicate()
    psutil.wait_procs([maker.server], timeout=60)


@pytest.fixture
def shared(maker: Maker, monkeypatch, tmp_path) -> psutil.Process:
    """The server that this process, and those that it starts in `tmp_path`, ask."""
    monkeypatch.setattr(forks, "_SERVER", BARE + forks._SERVER)
    monkeypatch.setenv(SHARED, maker.value)
    (tmp_path / "in_a_fork.py").write_text(IN_A_FORK)
    monkeypatch.chdir(tmp_path)
    return maker.server


def asks(program: str, **options: object) -> subprocess.Popen[str]:
    """A process of its own that asks the shared server."""
    before = "import sys; sys.path.insert(0, ''); import in_a_fork\n"
    before += "from labkit.launch.forks import forked\n"
    command = [sys.executable, "-c", before + program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def nothing_runs_below(server: psutil.Process) -> bool:
    return becomes(lambda: not server.children(recursive=True))


def test_four_processes_get_200_forks_of_one_server(shared):
    program = """
for number in range(50):
    with forked(in_a_fork.double, number) as connection:
        assert connection.recv() == 2 * number
import psutil
assert not psutil.Process().children()
"""
    askers = [asks(program) for _ in range(4)]
    assert [asker.wait(300) for asker in askers] == [0] * 4
    assert nothing_runs_below(shared)
    assert shared.num_threads() == 1


def test_a_fork_has_what_a_child_of_the_asker_would_have_and_runs_as_batch(shared, tmp_path):
    program = "with forked(in_a_fork.describe) as connection: print(connection.recv())"
    asker = asks(program, env={**os.environ, "GIVEN": "this"}, stderr=subprocess.PIPE)
    said, errors = asker.communicate(timeout=300)
    assert said == f"{(str(tmp_path), 'this', os.SCHED_BATCH)}\n"
    assert errors == "to standard error"


def test_an_asker_that_is_killed_leaves_nothing_and_the_server_goes_on(shared):
    program = """
with forked(in_a_fork.start_others) as connection:
    print(connection.recv(), flush=True)
    input()
"""
    askers = [asks(program, stdin=subprocess.PIPE) for _ in range(2)]
    assert [asker.stdout.readline() for asker in askers] == ["started\n"] * 2
    # In each: the supervisor, its fork, and a program in a session of its own.
    below = shared.children(recursive=True)
    assert len(below) == 6
    askers[0].kill()
    askers[0].wait()
    assert becomes(lambda: len(shared.children(recursive=True)) <= 3)
    askers[1].kill()
    askers[1].wait()
    assert all_end(one.pid for one in below)
    assert asks("with forked(in_a_fork.double, 1) as c: c.recv()").wait(300) == 0


def test_a_caller_of_run_forked_that_is_killed_leaves_no_process_and_no_folder(shared, tmp_path):
    program = """
import os
from labkit.launch.forks import ForkServer
from labkit.launch.popen import run_forked
server = ForkServer()
done = run_forked(server, in_a_fork.say, ["some words"], 300, os.getcwd(), dict(os.environ))
print(done.returncode, done.stdout, done.stderr, flush=True)
run_forked(server, in_a_fork.wait, [], 300, os.getcwd(), dict(os.environ))
"""
    (tmp_path / "tmp").mkdir()
    asker = asks(program, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")})
    assert asker.stdout.readline() == "3 ['some words'] an error\n"
    assert becomes(lambda: (tmp_path / "waits").exists())
    asker.kill()
    asker.wait()
    assert nothing_runs_below(shared)
    assert list((tmp_path / "tmp").iterdir()) == []


def modules_of_fork(caller: Connection, *names: str) -> None:
    caller.send((os.getppid(), [name in sys.modules for name in names]))


def test_a_server_with_more_modules_is_forked_from_it_once_for_all(shared):
    def ask(modules: tuple[str, ...]) -> tuple[int, list[bool]]:
        with ForkServer(*modules).forked(modules_of_fork, "wave") as connection:
            return connection.recv()

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, [("wave",)] * 4))
    [(pid, loaded)] = {(server, *loaded) for server, loaded in answers}
    assert loaded
    assert ask(()) == (shared.pid, [False])
    extended = psutil.Process(pid)
    assert extended.ppid() == shared.pid
    extended.kill()
    extended.wait()
    assert ask(("wave",))[1] == [True]


def test_a_process_that_has_just_started_can_be_killed(shared):
    for _ in range(100):
        process = ForkedPopen(ForkServer(), time.sleep, 300)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_a_fork_takes_an_interrupt_though_its_server_ignores_it(shared):
    process = ForkedPopen(ForkServer(), signal.raise_signal, signal.SIGINT)
    assert process.wait(30) == 1  # a traceback of KeyboardInterrupt


def test_where_the_shared_server_is_another_pythons_or_gone_a_process_starts_its_own(
    shared, monkeypatch
):
    monkeypatch.setattr(forks, "_SERVER", "raise SystemExit(3)")  # a server of its own fails
    python, _, address = os.environ[SHARED].partition(":")
    for value in (f"another:{address}", f"{python}:/no/such/socket"):
        monkeypatch.setenv(SHARED, value)
        with pytest.raises(NotStartedError), ForkServer().forked(modules_of_fork):
            pass


@pytest.mark.parametrize("asked", [False, True])
def test_when_the_maker_is_killed_no_server_and_no_folder_is_left(asked, maker, shared):
    servers = [shared.pid]
    if asked:
        with ForkServer("wave").forked(modules_of_fork) as connection:
            servers += [connection.recv()[0]]
    folder = Path(maker.value.partition(":")[2]).parent
    assert folder.stat().st_mode & 0o777 == 0o700  # no other user gets a fork
    maker.kill()
    assert all_end(servers)
    assert not folder.exists()


def test_when_the_server_is_killed_its_forks_go_on_and_the_next_one_comes_from_another(shared):
    server = ForkServer("wave")
    with forked(modules_of_fork) as connection:
        shared.kill()
        assert connection.recv()
    try:
        for _ in range(2):
            with server.forked(modules_of_fork, "wave") as connection:
                assert connection.recv() == (server.pid, [True])
            os.kill(server.pid, signal.SIGKILL)
    finally:
        server.stop()
