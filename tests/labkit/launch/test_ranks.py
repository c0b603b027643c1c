"""`run_ranks`: what it hands to a function, shows, raises, and survives."""

import functools
import linecache
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from processes import all_end, all_gone, becomes, processes_with

from labkit.launch.forks import SHARED, start_forked, stop_forked
from labkit.launch.ranks import RanksError, RanksTimeoutError, run_ranks


class OwnError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


# What a rank is given, and what comes back


def test_rank_world_size_and_device_are_handed_over_by_name_wherever_they_stand():
    def work(a, device, b, *rest, world_size, rank=99):
        return a, b, rest, rank, world_size, device.type, dist.get_rank(), dist.get_world_size()

    results = run_ranks(work, 2, "a", "b", "c", "d", device="cpu")
    assert results == [("a", "b", ("c", "d"), r, 2, "cpu", r, 2) for r in range(2)]
    assert run_ranks(functools.partial(lambda x, rank, y=5: (x, rank, y), 1), 2) == [
        (1, 0, 5),
        (1, 1, 5),
    ]


def test_ranks_are_new_processes_that_draw_numbers_of_their_own():
    def work():
        left = os.environ.get("LEFT_BEHIND"), getattr(torch, "left_behind", None)
        os.environ["LEFT_BEHIND"] = torch.left_behind = "here"
        imported = "pytest" in sys.modules or "test_ranks" in sys.modules
        return os.getpid(), torch.rand(1).item(), random.random(), np.random.rand(), left, imported

    results = run_ranks(work, 2) + run_ranks(work, 2)
    *pids_and_numbers, left, imported = zip(*results, strict=True)
    assert [len(set(different)) for different in pids_and_numbers] == [4] * 4
    assert set(left) == {(None, None)}
    assert set(imported) == {False}


def test_ranks_run_with_one_thread_in_the_callers_folder_and_environment_and_leave_no_file(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def work():
        return torch.get_num_threads(), os.getcwd(), dict(os.environ)

    for threads, folder, environment in run_ranks(work, 2, env={"GIVEN": "too"}):
        assert threads == 1
        assert Path(folder) == tmp_path
        assert environment.pop("GIVEN") == "too"
        environment.pop("GLOO_SOCKET_IFNAME")
        assert environment == dict(os.environ)
    assert list(tmp_path.iterdir()) == [], "what the supervisor wrote there"


def test_ranks_listen_on_the_loopback_interface_only():
    def work():
        x = torch.ones(1)
        dist.all_reduce(x)
        return [
            (connection.laddr.ip, connection.laddr.port)
            for connection in psutil.Process().net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ], os.environ["GLOO_SOCKET_IFNAME"]

    results = run_ranks(work, 2)
    # Here the host's own name may lead to loopback too; elsewhere only the variable does.
    assert [interface for _, interface in results] == ["lo", "lo"]
    listening = [address for addresses, _ in results for address in addresses]
    assert listening, "gloo listens somewhere, or this test looks in the wrong place"
    assert {ip for ip, _ in listening} <= {"127.0.0.1", "::1"}


# What is shown


def test_prints_are_shown_in_rank_order_and_marked(capfd):
    def work(rank, world_size):
        time.sleep(0.02 * (world_size - rank))  # the last rank prints first
        print("one\ntwo", rank)
        print("trouble", rank, file=sys.stderr)
        os.write(1, b"from below Python\n")

    run_ranks(work, 3)
    out, err = capfd.readouterr()
    lines = ["one", "two {r}", "from below Python"]
    assert out.splitlines() == [f"[rank {r}] {x.format(r=r)}" for r in range(3) for x in lines]
    assert err.splitlines() == [f"[rank {r}] trouble {r}" for r in range(3)]


def test_lines_are_shown_as_a_terminal_leaves_them_without_noise_and_not_without_end(capfd):
    def work():
        sys.stdout.write("  0%|  \r 50%|= \r100%|==\nform\x0cfeed\n")
        sys.stdout.flush()
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number is : 1\n")
        os.write(2, b"[W1121 02:10:28.123456789 ProcessGroup.cpp:1] Warning: a time\nkept")
        for _ in range(3000):
            print("x" * 999)

    run_ranks(work, 1)
    out, err = capfd.readouterr()
    first, second, *_, last = out.removesuffix("\n").split("\n")
    assert (first, second) == ("[rank 0] 100%|==", "[rank 0] form\x0cfeed")
    assert re.fullmatch(r"\[rank 0\] … 2,8\d\d,\d+ more bytes, not shown", last)
    assert len(out) < 300_000
    assert err == "[rank 0] kept\n"


# What goes wrong


def test_a_rank_raises_its_own_exception_with_its_traceback_and_the_others_states():
    def work(rank):
        if rank == 2:
            raise OwnError(7, "rank two is unhappy")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(OwnError, match="7: rank two is unhappy") as caught:
        run_ranks(work, 4)
    assert caught.value.code == 7
    [note] = caught.value.__notes__
    assert "Raised on rank 2 of 4" in note
    assert 'raise OwnError(7, "rank two is unhappy")' in note
    for rank in (0, 1, 3):
        assert re.search(
            rf"rank {rank}: waits in all_reduce, at .*test_ranks.py line \d+: "
            r"dist.all_reduce\(torch.ones\(1\)\)",
            note,
        )


def test_an_exception_that_cannot_travel_is_told_in_words():
    def work(rank):
        raise ValueError("locked", threading.Lock())

    with pytest.raises(RanksError, match=r"(?s)rank 0 of 2 raised:.*ValueError: \('locked', <unlo"):
        run_ranks(work, 2)


def test_of_a_dead_rank_and_its_victims_the_dead_one_is_named_even_if_it_ends_a_second_later():
    def work(rank):
        dist.barrier()
        if rank == 1:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as a process that exits
            for connection in psutil.Process().net_connections(kind="inet"):
                # Not the socket that listens: gloo aborts where it can accept nothing.
                if connection.status == psutil.CONN_ESTABLISHED:
                    with socket.socket(fileno=os.dup(connection.fd)) as pair:
                        pair.shutdown(socket.SHUT_RDWR)
            time.sleep(1)
            os._exit(7)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksError, match=r"rank 1 of 3 ended without a result, .*exit code 7") as e:
        run_ranks(work, 3)
    assert re.search(r"rank 0: waits in all_reduce, at .* line \d+: dist\.all_reduce", str(e.value))


def leave(how: str) -> object:
    if how == "exit":
        sys.exit("enough")
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "child holds the pipe" and os.fork() == 0:
        time.sleep(60)
    if how.startswith("child"):
        os._exit(5)
    if how == "lock":
        return threading.Lock()

    class CannotBeRebuilt:
        def __reduce__(self):
            return int, ("not a number",)

    return CannotBeRebuilt()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", r"rank 1 of 2 called sys.exit\('enough'\).*Next: let"),
        ("signal", "rank 1 of 2 was killed by SIGKILL.*memory.*Next:"),
        ("child holds the pipe", "rank 1 of 2 ended without a result, with exit code 5"),
        ("lock", "rank 1 of 2 returned a lock, which cannot.*Next:"),
        ("nothing to rebuild", "rank 1 returned something that cannot be rebuilt"),
    ],
)
def test_a_rank_without_a_result_is_named_with_the_reason(how, said):
    def work(rank):
        if rank == 1:
            print("before")
            return leave(how)
        if how not in ("lock", "nothing to rebuild"):
            dist.all_reduce(torch.ones(1))
        return None

    with pytest.raises(RanksError, match=f"(?s){said}"):
        run_ranks(work, 2, timeout=30)


def test_a_hang_is_stopped_and_each_rank_is_described():
    def work(rank):
        if rank == 1:
            dist.broadcast_object_list([None], src=0)
        elif rank == 2:
            time.sleep(1000)
        elif rank == 3:
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        elif rank == 4:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RanksTimeoutError) as caught:
        run_ranks(work, 5, timeout=3)
    assert isinstance(caught.value, TimeoutError)
    here = r"at .*test_ranks.py line \d+: "
    patterns = [
        "rank 0: finished",
        rf"rank 1: waits in broadcast_object_list, {here}dist.broadcast_object_list",
        rf"rank 2: still runs, {here}time.sleep\(1000\)",
        rf"rank 3: waits for a collective that it launched earlier, {here}dist.all_reduce",
        "rank 4: does not answer: it is starting, is stopped",
    ]
    assert len(caught.value.states) == 5
    for pattern, state in zip(patterns, caught.value.states, strict=True):
        assert re.match(pattern, state)
        assert state in str(caught.value)
    assert "4 of 5 ranks did not finish within 3 s" in str(caught.value)
    assert "Next: every rank has to call the same collectives" in str(caught.value)


def test_a_hang_inside_backward_is_told_as_such():
    def work(rank):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        if rank == 0:
            model(torch.full((1, 2), float(rank + 1))).sum().backward()

    with pytest.raises(
        RanksTimeoutError, match=r"rank 0: is inside backward\(\), computing or wait"
    ):
        run_ranks(work, 2, stuck_after=1)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Stillness reads /proc")


@linux
def test_ranks_that_wait_for_each_other_forever_end_long_before_the_timeout():
    def work(rank):
        if rank == 0:
            dist.all_reduce(torch.ones(2_000_000))
        elif rank == 1:
            dist.recv(torch.ones(3), 2)

    began = time.monotonic()
    with pytest.raises(RanksTimeoutError, match=r"2 of 3 ranks wait for others, and") as e:
        run_ranks(work, 3, timeout=300, stuck_after=1)
    assert time.monotonic() - began < 150
    assert [state.split(",")[0] for state in e.value.states] == [
        "rank 0: waits in all_reduce",
        "rank 1: waits in recv",
        "rank 2: finished",
    ]


SHORT = 0.8  # seconds: four times as long as ranks may be stuck


def sleep():
    time.sleep(SHORT)


def compute():
    until = time.monotonic() + SHORT
    while time.monotonic() < until:
        torch.ones(300, 300) @ torch.ones(300, 300)


def wait_for_a_program():
    subprocess.run(["sleep", str(SHORT)], check=True)


def wait_for_a_thread():
    later = torch.futures.Future()
    threading.Timer(SHORT, later.set_result, [None]).start()
    later.wait()


def be_stopped():
    waker = f"sleep {SHORT}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", f"({waker}) &"], start_new_session=True).wait()
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_in_backward():
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: time.sleep(SHORT))
    x.sum().backward()


def compute_in_backward():
    """There a rank may wait for others, too: only that it runs tells the two apart."""
    y = torch.ones(600, 600, requires_grad=True)
    for _ in range(100):
        y = y @ torch.full((600, 600), 1 / 600)
    y.sum().backward()


SLOW = (
    sleep,
    compute,
    compute_in_backward,
    wait_for_a_program,
    wait_for_a_thread,
    be_stopped,
    sleep_in_backward,
)


@linux
def test_ranks_that_wait_for_a_slow_one_are_not_stuck():
    def work(rank, slow):
        if rank == 1:
            slow()
        dist.all_reduce(torch.ones(1))
        return rank

    with ThreadPoolExecutor() as at_once:
        calls = [at_once.submit(run_ranks, work, 2, slow, stuck_after=0.2) for slow in SLOW]
        assert [call.result() for call in calls] == [[0, 1]] * len(SLOW)


def two_more(rank, x, y):
    return x


def holds_a_lock(lock=threading.Lock()):  # noqa: B008
    return lock


@pytest.mark.parametrize(
    ("error", "said", "fn", "world_size", "args", "options"),
    [
        (ValueError, "world_size must be at least 1, got 0", two_more, 0, (1, 2), {}),
        (TypeError, "world_size is the number of ranks, an int, got", two_more, True, (1, 2), {}),
        (ValueError, "timeout must be a pos", two_more, 2, (1, 2), {"timeout": float("nan")}),
        (ValueError, 'device must be "auto", "cpu" or', two_more, 2, (1, 2), {"device": "tpu"}),
        (TypeError, r"cannot call two_more with 1 arg.*argument: 'y'", two_more, 2, (1,), {}),
        (TypeError, "needs a function, got int", 7, 2, (), {}),
        (TypeError, "wrap it in a function of yours", torch.ones, 2, (3,), {}),
        (ValueError, "stuck_after must be a pos", two_more, 2, (1, 2), {"stuck_after": -1}),
        (TypeError, r"env\['A'\] has to be a stri", two_more, 2, (1, 2), {"env": {"A": 1}}),
        (TypeError, "env is a dictionary of str", two_more, 2, (1, 2), {"env": "x"}),
        (ValueError, r"env\['A'\].* a NUL", two_more, 2, (1, 2), {"env": {"A": "a\0"}}),
        (ValueError, r"env\['A='\].* can be no env", two_more, 2, (1, 2), {"env": {"A=": "a"}}),
        (RanksError, "cannot be sent to the ranks.*created inside the", holds_a_lock, 2, (), {}),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_starts(
    error, said, fn, world_size, args, options
):
    with pytest.raises(error, match=said):
        run_ranks(fn, world_size, *args, **options)


def test_where_processes_cannot_be_forked_the_error_says_where_they_can(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(RanksError, match="on Windows, use WSL"):
        run_ranks(lambda: None, 2)


def test_a_function_may_close_its_output_and_end_the_process_group():
    def work(rank):
        dist.destroy_process_group()
        if rank:
            sys.stdout.close()
        else:
            sys.stdout = None
        return rank

    for _ in range(3):
        assert run_ranks(work, 4) == [0, 1, 2, 3]


def test_errors_show_the_text_of_a_notebook_cell_and_not_the_kernels_temporary_file():
    file = "/tmp/ipykernel_1/2.py"
    source = "def work(rank):\n    y = rank\n    raise ValueError('in a cell')\n"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        exec(compile(source, file, "exec"), namespace)
        with pytest.raises(ValueError, match="in a cell") as caught:
            run_ranks(namespace["work"], 2)
    finally:
        del linecache.cache[file]
    [note] = caught.value.__notes__
    assert 'File "<cell>", line 3, in work\n    raise ValueError' in note
    assert "ipykernel" not in note


# What is left behind: nothing


def test_nothing_that_a_rank_started_outlives_the_call():
    marker = uuid.uuid4().hex

    def work(rank):
        subprocess.Popen(["sleep", "300"])
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        daemon = "import os,time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(300)"
        subprocess.run([sys.executable, "-c", daemon], check=True)
        if rank == 1:
            raise ValueError("at the worst moment")

    with pytest.raises(ValueError, match="at the worst moment"):
        run_ranks(work, 2, env={"MARKER": marker})
    assert processes_with(marker) == []


def call_ranks_that_wait(ready: Path) -> None:
    def work(rank):
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        (ready / "new").with_suffix(f".{rank}").write_text(str(os.getpid()))
        (ready / "new").with_suffix(f".{rank}").rename(ready / str(rank))
        time.sleep(300)

    run_ranks(work, 3, timeout=290)


def test_no_process_is_left_when_the_caller_ends_in_the_middle(tmp_path):
    ends = [
        (os.kill, signal.SIGKILL),
        (os.killpg, signal.SIGKILL),
        (os.kill, signal.SIGTERM),
        (os.kill, signal.SIGINT),
    ]
    callers = []
    for number in range(len(ends)):
        (ready := tmp_path / str(number)).mkdir()
        place = {"stderr": tmp_path / "errors", "environment": {**os.environ, "M": str(ready)}}
        callers.append((start_forked(call_ranks_that_wait, ready, **place), ready))
    try:
        for (caller, ready), (send, end) in zip(callers, ends, strict=True):
            assert becomes(lambda ready=ready: len(list(ready.glob("?"))) == 3, 300)
            assert len(processes_with(str(ready))) >= 3, "what the ranks started"
            send(caller.pid, end)
            caller.join(60)
            assert caller.exitcode
            assert all_gone(str(ready))
            assert all_end(int(file.read_text()) for file in ready.iterdir())
    finally:
        stop_forked(*(caller for caller, _ in callers))


def test_if_the_supervisor_itself_is_killed_its_ranks_die_with_it():
    marker = uuid.uuid4().hex

    def work():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RanksError, match="the ranks' supervisor ended without a result"):
        run_ranks(work, 2, env={"MARKER": marker})
    assert all_gone(marker)


def call_twice_and_interrupt_the_first() -> None:
    """Print what the second call returns, and whose process group a server of its own is in."""
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        run_ranks(lambda: time.sleep(100), 2)
    except KeyboardInterrupt:
        children = psutil.Process().children()
        own = [os.getpgid(child.pid) == os.getpgrp() for child in children]
        print(run_ranks(lambda rank: rank, 2), own)


@pytest.mark.parametrize(("shared", "own"), [(True, []), (False, [False])])
def test_after_an_interrupted_call_the_next_one_works(shared, own, tmp_path):
    """It is interrupted while it waits for its ranks, or for the start of its own server.

    A notebook's kernel waits, at its end, for the children in its own process group.
    """
    environment = {name: os.environ[name] for name in os.environ if shared or name != SHARED}
    out, err = tmp_path / "out", tmp_path / "err"
    place = {"stdout": out, "stderr": err, "environment": environment}
    caller = start_forked(call_twice_and_interrupt_the_first, **place)
    caller.join(300)
    assert (caller.exitcode, out.read_text(), err.read_text()) == (0, f"[0, 1] {own}\n", "")
