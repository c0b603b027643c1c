"""`run_ranks` as a chapter's author meets it: what it hands out, shows, raises and survives."""

import functools
import linecache
import multiprocessing.forkserver
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from large_pages import ON_REQUEST, mib_in_large_pages
from processes import all_gone, processes_with

from labkit.launch.rank_process import Report
from labkit.launch.rank_states import STARTING
from labkit.launch.rank_supervisor import Outcome
from labkit.launch.ranks import RanksError, RanksTimeoutError, run_ranks
from labkit.launch.scripts import run_script


@dataclass
class Sum:
    rank: int
    total: float


class OwnError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


# What a rank is given, and what comes back


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order_after_a_real_all_reduce(world_size):
    def work(rank, world_size, device, scale):
        x = torch.tensor([float(rank + 1)], device=device)
        dist.all_reduce(x)
        return Sum(rank, x.item() * scale)

    wanted = 10.0 * sum(range(1, world_size + 1))
    assert run_ranks(work, world_size, 10.0) == [Sum(r, wanted) for r in range(world_size)]


@pytest.mark.skipif(not ON_REQUEST, reason="needs Linux 6.1, and pages of 2 MiB on request")
def test_the_fork_server_of_ranks_lies_in_large_pages():
    run_ranks(lambda: None, 2)
    assert mib_in_large_pages(multiprocessing.forkserver._forkserver._forkserver_pid) > 50


def test_rank_world_size_and_device_are_handed_over_by_name_wherever_they_stand():
    def work(a, device, b, *rest, world_size, rank=99):
        return a, b, rest, rank, world_size, device.type, dist.get_rank(), dist.get_world_size()

    results = run_ranks(work, 2, "a", "b", "c", "d", device="cpu")
    assert results == [("a", "b", ("c", "d"), r, 2, "cpu", r, 2) for r in range(2)]


def test_functions_without_a_name_and_with_a_default_can_be_run():
    offset = 100
    assert run_ranks(lambda rank: rank + offset, 2) == [100, 101]
    assert run_ranks(functools.partial(lambda x, rank, y=5: (x, rank, y), 1), 2) == [
        (1, 0, 5),
        (1, 1, 5),
    ]


def test_tensors_and_objects_of_a_test_module_survive_the_way_back():
    def work(rank):
        return {"x": torch.full((2, 3), float(rank), dtype=torch.bfloat16), "sum": Sum(rank, 0.5)}

    results = run_ranks(work, 2)
    for rank, result in enumerate(results):
        assert torch.equal(result["x"], torch.full((2, 3), float(rank), dtype=torch.bfloat16))
        assert isinstance(result["sum"], Sum)
        assert result["sum"].rank == rank


def test_every_call_starts_fresh_processes_that_share_no_state():
    def work(rank):
        seen = os.environ.get("LEFT_BEHIND"), getattr(torch, "left_behind", None)
        os.environ["LEFT_BEHIND"] = torch.left_behind = str(rank)
        return os.getpid(), seen

    first, second = run_ranks(work, 2), run_ranks(work, 2)
    pids = {pid for pid, _ in first + second}
    assert len(pids) == 4
    assert os.getpid() not in pids
    assert [seen for _, seen in first + second] == [(None, None)] * 4


def test_unseeded_ranks_draw_different_numbers_as_processes_under_torchrun_do():
    def work():
        return torch.rand(1).item(), random.random(), np.random.rand()

    results = run_ranks(work, 3) + run_ranks(work, 3)
    for drawn in zip(*results, strict=True):
        assert len(set(drawn)) == 6


def test_ranks_run_with_one_thread_in_the_callers_folder_and_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_AFTER_THE_FORK_SERVER_STARTED", "yes")

    def work():
        return torch.get_num_threads(), os.getcwd(), dict(os.environ)

    for threads, folder, environment in run_ranks(work, 2, env={"GIVEN": "too"}):
        assert threads == 1
        assert Path(folder) == tmp_path
        assert environment.pop("GIVEN") == "too"
        environment.pop("GLOO_SOCKET_IFNAME")
        assert environment == dict(os.environ)


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


def test_run_ranks_works_in_a_thread_and_several_times_at_once():
    def work(rank, number):
        x = torch.tensor([float(rank * number)])
        dist.all_reduce(x)
        return x.item()

    found: dict[int, list[float]] = {}
    main = sys.modules["__main__"]

    def call(number: int) -> None:
        found[number] = run_ranks(work, 2, number)

    threads = [threading.Thread(target=call, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.modules["__main__"] is main
    assert found == {n: [float(n)] * 2 for n in (1, 2, 3)}


# What is shown


def test_prints_are_shown_in_rank_order_and_marked_the_same_at_every_run(capfd):
    def work(rank, world_size):
        time.sleep(0.02 * (world_size - rank))  # the last rank prints first
        print("one\ntwo", rank)
        print("trouble", rank, file=sys.stderr)
        os.write(1, b"from below Python\n")

    shown = set()
    for _ in range(3):
        run_ranks(work, 3)
        shown.add(capfd.readouterr())
    assert len(shown) == 1
    out, err = shown.pop()
    lines = ["one", "two {r}", "from below Python"]
    assert out.splitlines() == [f"[rank {r}] {x.format(r=r)}" for r in range(3) for x in lines]
    assert err.splitlines() == [f"[rank {r}] trouble {r}" for r in range(3)]


def test_what_a_failing_rank_printed_is_shown_before_its_error(capfd):
    def work(rank):
        print("before")
        if rank == 1:
            os._exit(3)

    with pytest.raises(RanksError):
        run_ranks(work, 2)
    assert "[rank 1] before" in capfd.readouterr().out


def test_a_flood_of_output_is_cut_and_counted(capfd):
    def work():
        for _ in range(3000):
            print("x" * 999)

    run_ranks(work, 1)
    out = capfd.readouterr().out
    assert len(out) < 300_000
    assert out.splitlines()[-1] == "[rank 0] … 2,800,000 more bytes, not shown"


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


def test_of_a_dead_rank_and_its_victims_the_dead_one_is_named():
    def work(rank):
        dist.barrier()
        if rank == 1:
            os._exit(7)
        dist.all_reduce(torch.full((1000,), float(rank)))

    said = set()
    for _ in range(3):
        with pytest.raises(
            RanksError, match=r"rank 1 of 3 ended without a result, .*exit code 7"
        ) as caught:
            run_ranks(work, 3)
        said.add(str(caught.value))
    assert len(said) == 1, "a chapter that stores this text compares it"
    assert re.search(r"rank 0: waits in all_reduce, at .* line \d+: dist\.all_reduce", said.pop())


def test_a_rank_that_calls_sys_exit_is_named_with_the_next_action():
    def work(rank):
        if rank == 1:
            sys.exit("enough")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksError, match=r"(?s)rank 1 of 2 called sys.exit\('enough'\).*Next: let"):
        run_ranks(work, 2)


def test_a_killed_rank_is_named_with_its_signal():
    def work(rank):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksError, match=r"(?s)rank 0 of 2 was killed by SIGKILL.*memory.*Next:"):
        run_ranks(work, 2)


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="has no real-time signals")
def test_a_rank_killed_by_a_signal_without_a_name_is_named_with_its_number():
    number = signal.SIGRTMIN + 6

    def work(rank):
        if rank == 1:
            signal.raise_signal(number)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksError, match=rf"rank 1 of 2 was killed by signal {number}\."):
        run_ranks(work, 2)


def test_a_dead_rank_is_noticed_although_a_child_of_it_holds_its_pipes_open():
    def work(rank):
        if rank == 1:
            if os.fork() == 0:
                time.sleep(60)
            os._exit(5)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksError, match="rank 1 of 2 ended without a result, with exit code 5"):
        run_ranks(work, 2, timeout=30)


def test_a_hang_is_stopped_and_each_rank_is_described():
    def work(rank):
        if rank == 1:
            dist.broadcast_object_list([None], src=0)
        elif rank == 2:
            time.sleep(100)
        elif rank == 3:
            dist.all_reduce(torch.ones(3), async_op=True).wait()

    start = time.monotonic()
    with pytest.raises(RanksTimeoutError) as caught:
        run_ranks(work, 4, timeout=1.5)
    assert time.monotonic() - start < 45
    assert isinstance(caught.value, TimeoutError)
    here = r"at .*test_ranks.py line \d+: "
    patterns = [
        "rank 0: finished",
        rf"rank 1: waits in broadcast_object_list, {here}dist.broadcast_object_list",
        rf"rank 2: still runs, {here}time.sleep\(100\)",
        rf"rank 3: waits for a collective that it launched earlier, {here}dist.all_reduce",
    ]
    assert len(caught.value.states) == 4
    for pattern, state in zip(patterns, caught.value.states, strict=True):
        assert re.match(pattern, state)
        assert state in str(caught.value)
    assert "3 of 4 ranks did not finish within 1.5 s" in str(caught.value)
    assert "Next: every rank has to call the same collectives" in str(caught.value)


RANK_1_STARTS_LATE = """
import multiprocessing, os, sys, time
import cloudpickle
from labkit.launch import rank_supervisor
from labkit.launch.rank_process import Job, run_rank

def hold_back(rank, *rest):
    time.sleep(float(sys.argv[1]) * rank)
    run_rank(rank, *rest)

rank_supervisor.run_rank = hold_back
payload = cloudpickle.dumps((lambda rank: rank, ()))
job = Job(payload, "", ("cpu", "cpu"), "gloo", 1.0, dict(os.environ), {}, "fork")
ours, theirs = multiprocessing.Pipe()
rank_supervisor.supervise(theirs, job)
print([report.status for report in ours.recv().reports])
"""


def test_the_time_that_ranks_take_to_join_does_not_count(script):
    said = run_script(script(RANK_1_STARTS_LATE), 2.5, ranks=1, timeout=100)
    assert said == "['returned', 'returned']"


NO_MORE_PROCESSES = """
import multiprocessing, os
import cloudpickle
from multiprocessing.context import ForkProcess
from labkit.launch import rank_supervisor
from labkit.launch.rank_process import Job

start, started = ForkProcess.start, []

def start_two(process):
    if len(started) == 2:
        raise BlockingIOError("no more processes")
    started.append(start(process))

ForkProcess.start = start_two
payload = cloudpickle.dumps((lambda rank: rank, ()))
job = Job(payload, "", ("cpu",) * 3, "gloo", 30.0, dict(os.environ), {}, "fork")
ours, theirs = multiprocessing.Pipe()
try:
    rank_supervisor.supervise(theirs, job)
except BlockingIOError as error:
    print(error, len(started), len(multiprocessing.active_children()))
"""


def test_if_the_system_refuses_to_start_a_rank_those_that_wait_for_it_are_ended(script):
    said = run_script(script(NO_MORE_PROCESSES), ranks=1, timeout=100)
    assert said == "no more processes 2 0"


def test_to_ask_a_rank_that_is_starting_for_its_stack_does_not_kill_it(script, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no such interface")  # so rank 0 fails
    said = run_script(script(RANK_1_STARTS_LATE), 30, ranks=1, timeout=100)
    assert said == "['raised', 'unfinished']"


def test_ranks_that_could_not_start_are_told_from_a_function_that_takes_too_long(monkeypatch):
    reports = [Report("unfinished", STARTING, waits=True)] * 2
    outcome = Outcome(reports, [("", "")] * 2, all_joined=False)
    monkeypatch.setattr("labkit.launch.ranks._supervised", lambda job: outcome)
    with pytest.raises(
        RanksTimeoutError, match=r"2 of 2 ranks did not start within 30 s(.|\n)*busy"
    ):
        run_ranks(lambda: None, 2, timeout=1)


def test_a_rank_that_dies_after_its_report_costs_no_result():
    def work(rank):
        if rank == 0:
            threading.Timer(0.5, os._exit, [3]).start()
        else:
            time.sleep(1.5)
        return rank

    assert run_ranks(work, 2) == [0, 1]


@pytest.mark.parametrize("kind", [ConnectionRefusedError, RuntimeError])
def test_a_rank_whose_own_connection_was_refused_is_not_said_to_run(kind):
    def work(rank):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # nobody listens there
            try:
                socket.create_connection(unused.getsockname())
            except ConnectionRefusedError as error:
                raise kind(str(error)) from error

    with pytest.raises(kind) as caught:
        run_ranks(work, 2)
    last = caught.value.__notes__[0].splitlines()[-1]
    assert last.startswith(f"  rank 1: raised {kind.__name__}: ")


def test_a_rank_that_lost_its_peer_while_it_was_wrapped_is_told_by_its_line():
    def work(rank):
        if rank == 0:
            time.sleep(1)
            os._exit(3)
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    with pytest.raises(RanksError) as caught:
        run_ranks(work, 2)
    assert caught.value.states[1].startswith(
        "rank 1: waits in a collective of DistributedDataParallel, at "
    )


def test_a_hang_inside_backward_is_told_as_such():
    def work(rank):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        if rank == 0:
            model(torch.full((1, 2), float(rank + 1))).sum().backward()

    with pytest.raises(
        RanksTimeoutError, match=r"rank 0: is inside backward\(\), computing or wait"
    ):
        run_ranks(work, 2, timeout=2)


def test_different_collectives_on_two_ranks_end_in_bounded_time_with_both_ranks_named():
    def work(rank):
        x = torch.full((4,), float(rank))
        if rank == 0:
            dist.all_reduce(x)
        else:
            dist.barrier()
            dist.all_gather_object([None, None], "x")

    start = time.monotonic()
    with pytest.raises((RuntimeError, TimeoutError)) as caught:
        run_ranks(work, 2, timeout=3)
    assert time.monotonic() - start < 45
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "rank 0" in said
    assert "rank 1" in said


def test_all_reduces_of_different_lengths_end_in_bounded_time():
    def work(rank):
        dist.all_reduce(torch.ones(1000 * (rank + 1)))
        dist.barrier()

    start = time.monotonic()
    with pytest.raises((RuntimeError, TimeoutError)) as caught:
        run_ranks(work, 2, timeout=3)
    assert time.monotonic() - start < 45
    assert "rank" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


def test_a_function_that_holds_a_lock_cannot_be_shipped_and_the_error_says_what_to_do():
    lock = threading.Lock()

    def work():
        with lock:
            return 1

    with pytest.raises(
        RanksError, match=r"work cannot be sent to the ranks.*lock.*created inside the function"
    ):
        run_ranks(work, 2)


def test_a_result_that_cannot_be_sent_back_names_the_rank_and_its_type():
    def work(rank):
        return threading.Lock() if rank == 1 else rank

    with pytest.raises(RanksError, match=r"(?s)rank 1 of 2 returned a lock, which cannot.*Next:"):
        run_ranks(work, 2)


def test_a_result_that_cannot_be_rebuilt_names_the_rank():
    def work(rank):
        class Broken:
            def __reduce__(self):
                return int, ("not a number",)

        return Broken() if rank == 1 else rank

    with pytest.raises(RanksError, match=r"rank 1 returned something that cannot be rebuilt"):
        run_ranks(work, 2)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_of_no_ranks_is_refused(world_size):
    with pytest.raises(ValueError, match=f"world_size must be at least 1, got {world_size}"):
        run_ranks(lambda rank: rank, world_size)


@pytest.mark.parametrize("world_size", [True, 2.0, "2", None])
def test_a_world_size_that_is_not_a_number_of_ranks_is_refused(world_size):
    with pytest.raises(TypeError, match="world_size is the number of ranks, an int, got"):
        run_ranks(lambda rank: rank, world_size)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "10", None])
def test_a_timeout_that_is_not_a_positive_time_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be a positive, finite number of seconds"):
        run_ranks(lambda rank: rank, 2, timeout=timeout)


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match='device must be "auto", "cpu" or "cuda"'):
        run_ranks(lambda rank: rank, 2, device="tpu")


def test_arguments_that_do_not_fit_the_function_are_refused_before_anything_starts():
    def work(rank, x, y):
        return x

    with pytest.raises(TypeError, match=r"cannot call work with 1 argument\(s\): .*parameter 'y'"):
        run_ranks(work, 2, 1)
    with pytest.raises(TypeError, match=r"cannot call work with 4 argument\(s\): 2 more"):
        run_ranks(work, 2, 1, 2, 3, 4)
    with pytest.raises(TypeError, match="needs a function, got int"):
        run_ranks(7, 2)


@pytest.mark.parametrize(("gpus", "world_size"), [(4, 4), (8, 2)])
def test_with_enough_gpus_every_rank_gets_its_own_and_nccl(monkeypatch, gpus, world_size):
    from labkit.launch import ranks

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    devices, backend = ranks._place(world_size, "auto")
    assert devices == tuple(f"cuda:{r}" for r in range(world_size))
    assert "cuda:nccl" in backend


def test_with_too_few_gpus_ranks_take_the_cpu_unless_they_are_asked_to_share(monkeypatch):
    from labkit.launch import ranks

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert ranks._place(2, "auto") == (("cpu", "cpu"), "gloo")
    assert ranks._place(2, "cuda") == (("cuda:0", "cuda:0"), "gloo")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="torch finds none"):
        ranks._place(2, "cuda")


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


def test_without_a_fork_server_ranks_are_spawned_and_the_reader_is_told_what_is_missing(
    monkeypatch,
):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])

    def work(rank):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return x.item()

    with pytest.warns(UserWarning, match="no fork server.*takes seconds"):
        assert run_ranks(work, 2) == [1.0, 1.0]


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


# Each caller is a fork, because to load torch anew takes longer than all else that it does.
CALLERS = """
import os, subprocess, sys, time
from labkit.launch.guard import die_with_parent
from labkit.launch.ranks import run_ranks

def work(rank, ready):
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    if rank == 0:
        print("started", flush=True)
        open(ready, "w").close()
    time.sleep(300)

print("imported", __name__, flush=True)
for ready in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    die_with_parent()
    os.setsid()
    os.environ["MARKER"] = ready
    run_ranks(work, 3, ready, timeout=290)
"""


def test_no_process_is_left_when_the_calling_script_ends_in_the_middle(tmp_path):
    ends = [
        ("SIGKILL", os.kill, signal.SIGKILL),
        ("SIGKILL to the process group", os.killpg, signal.SIGKILL),
        ("SIGTERM", os.kill, signal.SIGTERM),
        ("Ctrl-C", os.kill, signal.SIGINT),
    ]
    script = tmp_path / "script.py"
    script.write_text(CALLERS)
    all_ready = [tmp_path / name for name, _, _ in ends]
    callers = subprocess.Popen(
        [sys.executable, script, *all_ready],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        for (name, send, end), ready in zip(ends, all_ready, strict=True):
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert callers.poll() is None, name
                assert time.monotonic() < deadline, name
                time.sleep(0.05)
            [caller] = psutil.Process(callers.pid).children()
            marker = str(ready)
            # Supervisor, ranks, the fork server and its tracker, and at least one sleep.
            assert len(processes_with(marker)) >= 7, name
            send(caller.pid, end)
            caller.wait(timeout=20)
            assert all_gone(marker), name
    finally:
        callers.kill()
        output, _ = callers.communicate()
    # The script has no `if __name__ == "__main__"`: it must not have been imported again.
    assert output.splitlines() == ["imported __main__"]


def test_a_test_module_is_not_imported_again_in_the_ranks():
    def work():
        return [name for name in ("pytest", "test_ranks", __name__) if name in sys.modules]

    assert run_ranks(work, 2) == [[], []]


def test_of_a_progress_bar_the_last_state_is_shown_and_noise_of_the_libraries_is_not(capfd):
    def work():
        sys.stdout.write("  0%|  \r 50%|= \r100%|==\nform\x0cfeed\nno end of line")
        sys.stdout.flush()
        os.write(1, b"\n[Gloo] Rank 0 is connected to 1 peer ranks. Expected number is : 1\n")
        os.write(2, b"[W1121 02:10:28.123456789 ProcessGroup.cpp:1] Warning: a time\nkept\n")

    run_ranks(work, 1)
    out, err = capfd.readouterr()
    assert out == "[rank 0] 100%|==\n[rank 0] form\x0cfeed\n[rank 0] no end of line\n"
    assert err == "[rank 0] kept\n"


def test_a_temporary_folder_with_a_space_and_an_umlaut_will_do_and_none_is_left_in_it():
    script = (
        "from labkit.launch.ranks import run_ranks\n"
        "print(run_ranks(lambda rank: rank, 2, timeout=20))"
    )
    # Not pytest's own temporary folder: the path of a Unix socket has to be short.
    with tempfile.TemporaryDirectory(prefix="a ümlaut ") as folder:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout == "[0, 1]\n", done.stderr
        assert [p.name for p in Path(folder).iterdir() if p.name.startswith("ranks-")] == []


def test_a_function_may_end_the_process_group_itself():
    def work(rank):
        dist.destroy_process_group()
        return rank

    for _ in range(5):
        assert run_ranks(work, 4) == [0, 1, 2, 3]


def test_a_rank_that_closes_its_output_still_returns_its_result():
    def work(rank):
        if rank:
            sys.stdout.close()
        else:
            sys.stdout = None
        return rank

    assert run_ranks(work, 2) == [0, 1]


def test_the_other_ranks_exceptions_are_told_in_one_line():
    def work(rank):
        if rank == 1:
            time.sleep(0.5)
            raise ExceptionGroup("two\nlines", [ValueError("inner")])
        raise KeyError("first")

    with pytest.raises(KeyError) as caught:
        run_ranks(work, 2)
    assert caught.value.__notes__[0].splitlines()[-1] == "  rank 1: raised ExceptionGroup: two"


def test_a_stopped_rank_is_told_from_one_that_never_started():
    def work(rank):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(
        RanksTimeoutError, match="rank 0: does not answer: it is starting, is stopped"
    ):
        run_ranks(work, 2, timeout=1.5)


def test_a_rank_that_gets_no_core_for_a_moment_is_waited_for():
    def work(rank):
        if rank == 0:
            subprocess.Popen(["sh", "-c", f"sleep 1.6; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)  # past the moment at which it is asked
            time.sleep(100)

    with pytest.raises(RanksTimeoutError, match="rank 0: still runs, at"):
        run_ranks(work, 2, timeout=1.5)


def test_an_environment_variable_that_is_no_string_is_named():
    with pytest.raises(TypeError, match=r"env\['A'\] has to be a string, got 1"):
        run_ranks(lambda: None, 1, env={"A": 1})


def test_a_builtin_whose_parameters_cannot_be_read_is_refused_in_words():
    with pytest.raises(TypeError, match="wrap it in a function of yours"):
        run_ranks(torch.ones, 2, 3)


def test_if_the_supervisor_itself_is_killed_its_ranks_die_with_it():
    marker = uuid.uuid4().hex

    def work():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RanksError, match="the ranks' supervisor ended without a result"):
        run_ranks(work, 2, env={"MARKER": marker})
    assert all_gone(marker)


def test_after_the_fork_server_was_killed_the_next_call_starts_another():
    run_ranks(lambda: None, 1)
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)
    assert run_ranks(lambda rank: rank, 2) == [0, 1]
    assert multiprocessing.forkserver._forkserver._forkserver_pid != server


INTERRUPTED = """
import os, signal, sys, threading, time
from labkit.launch.ranks import run_ranks

for delay in (0.2, 1.0, 1.6):
    if os.fork():
        os.wait()
        continue
    threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        run_ranks(lambda: time.sleep(20), 2)
    except KeyboardInterrupt:
        print("interrupted after", delay)
    print(run_ranks(lambda rank: rank, 2))
    sys.exit()
"""


def test_after_an_interrupted_first_call_the_next_one_works():
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    each = "interrupted after {}\n[0, 1]\n"
    assert done.stdout == "".join(map(each.format, (0.2, 1.0, 1.6))), done.stderr
    assert done.stderr == ""
