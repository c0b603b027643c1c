"""What happens to a run does not depend on the doctor, and the doctor survives what happens."""

from collections.abc import Callable
from pathlib import Path

import pytest
from doctor.harness.runs import Outcome, Server
from doctor.harness.scripts import Script

Write = Callable[..., Script]

START = """
import os, resource, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", timeout=timedelta(seconds=100))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

def there_is(report):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if os.path.exists(report) and os.path.getsize(report):
            return True
        time.sleep(0.05)
    return False
"""
LOOP = """
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(rank)
for step in range(5):
    if step == 3:
        event()
    x = torch.randn(3, 4, generator=gen)
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(x), x[:, :2])
    loss.backward()
    opt.step()
print(rank, f"{loss.item():.7f}", flush=True)
"""
END = "dist.barrier()\ndist.destroy_process_group()\n"


NO_EVENT = "def event():\n    pass\n"


def train(event: str = NO_EVENT, end: str = END) -> str:
    return START + event + LOOP + end


def unchanged(server: Server, script: Script, *options: str) -> Outcome:
    """The run with the doctor, which ends, prints, and computes the same as the one without."""
    looked, plain = server.run(script, doctor=True, options=options), server.run(script, False)
    assert not looked.differences(plain), looked.errors
    assert looked.report is not None, looked.errors
    return looked


def codes(outcome: Outcome) -> dict[str, str]:
    assert outcome.report is not None, outcome.errors
    return {finding["code"]: finding["evidence"] for finding in outcome.report["findings"]}


def assert_right(outcome: Outcome) -> None:
    assert outcome.codes == [0, 0], outcome.errors
    assert outcome.report is not None
    measured = outcome.report["measured"]
    assert measured["gradients"]["combination"] == "averaged", measured
    assert codes(outcome) == {}


def test_a_rank_killed_with_signal_9_is_named_in_the_report(server: Server, script: Write) -> None:
    event = "def event():\n    if rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    looked = server.run(script(train(event)), doctor=True)
    assert looked.codes[1] == -9
    assert "rank 1 ended unexpectedly" in codes(looked)["hang_missing_rank"]


def test_after_ctrl_c_there_is_a_report_and_the_same_exit_code(
    server: Server, script: Write
) -> None:
    event = "def event():\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\n"
    looked = unchanged(server, script(train(event)))
    assert looked.report is not None
    assert looked.report["steps"]["taken"] == 3


def test_a_full_disk_ends_the_journal_and_not_the_run(server: Server, script: Write) -> None:
    event = "def event():\n    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    looked = unchanged(server, script(train(event)))
    assert looked.codes == [0, 0]
    assert looked.errors.count("stopped observing (OSError") == 2


def test_an_unwritable_folder_is_named_and_the_run_goes_on(server: Server, script: Write) -> None:
    looked = server.run(script(train()), True, options=("--folder", "/proc/ddp-doctor"))
    assert looked.codes == [0, 0], looked.errors
    assert looked.errors.count("Pass another --folder; your run goes on.") == 2


def test_a_script_that_leaves_by_os_exit_keeps_its_code_and_gets_a_report(
    server: Server, script: Write
) -> None:
    looked = unchanged(server, script(train(end="dist.barrier()\nos._exit(7)\n")))
    assert looked.codes == [7, 7]
    assert codes(looked) == {}


def test_a_scripts_own_excepthook_is_called_once(server: Server, script: Write) -> None:
    event = """
def hook(kind, value, trace):
    print("own hook", kind.__name__, value, flush=True)
sys.excepthook = hook
def event():
    raise ValueError(f"of rank {rank}")
"""
    looked = unchanged(server, script(train(event)))
    assert looked.lines["own hook ValueError of rank 1"] == 1
    assert looked.report is not None
    assert looked.report["ranks"][1]["error"]["text"] == "of rank 1"


def test_a_hang_is_reported_while_the_ranks_are_still_stuck(
    server: Server, script: Write, tmp_path: Path
) -> None:
    early = tmp_path / "early.json"
    event = f"""
def event():
    if rank == 1:
        if there_is({str(early)!r}):
            print("reported while stuck", flush=True)
        os._exit(3)
    dist.all_reduce(torch.ones(1))
"""
    # The second --json wins: the test watches that file while rank 0 waits in its all-reduce.
    outcome = server.run(
        script(train(event)), True, options=("--hang-after", "1", "--json", str(early))
    )
    assert outcome.lines["reported while stuck"] == 1
    assert "hang_missing_rank" in early.read_text()


def test_an_error_of_the_doctor_is_one_line_and_the_run_goes_on(
    server: Server, script: Write
) -> None:
    event = """
def event():
    recorder = sys.modules.get("ddp_doctor.observe.recorder")
    if recorder is not None:
        recorder.Recorder.before_update = None
"""
    looked = unchanged(server, script(train(event)))
    assert looked.codes == [0, 0]
    assert looked.errors.count("Your run goes on.") == 2


def test_a_batch_whose_backward_raises_is_skipped_and_the_next_steps_are_seen(
    server: Server, script: Write
) -> None:
    """People catch 'out of memory' and go on with the next batch."""
    event = """
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("out of memory")
def event():
    try:
        Fails.apply(torch.ones(2, requires_grad=True)).sum().backward()
    except RuntimeError:
        pass
    try:
        nn.functional.cross_entropy(torch.ones(2, 3), torch.ones(3))
    except (RuntimeError, ValueError):
        pass
    print("hooks", [len(p._backward_hooks or ()) for p in net.parameters()], flush=True)
"""
    text = train(event).replace("step == 3", "step == 1")
    assert_right(unchanged(server, script(text)))


def test_a_wrapper_of_another_library_is_recognized_by_what_it_has(
    server: Server, script: Write
) -> None:
    """MiniDDP is neither imported by the doctor nor a subclass of torch's wrapper."""
    text = train().replace(
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "from miniddp import MiniDDP as DDP",
    )
    assert_right(unchanged(server, script(text)))
    bypassed = server.run(script(text.replace("model(x)", "model.module(x)")), doctor=True)
    assert "Step 0, rank 0: backward reached the wrapped" in codes(bypassed)["wrapper_bypassed"]
    assert set(codes(bypassed)) == {"wrapper_bypassed", "replicas_drift"}
    skipped = "    if step != 2 or rank == 0:\n        loss.backward()\n"
    skipping = text.replace("    loss.backward()\n", skipped).replace("dist.barrier()\n", "")
    hung = server.run(script(skipping), doctor=True)
    assert "Rank 0 waits in backward at" in codes(hung)["hang_missing_rank"]


TWO_LOSSES = train().replace(
    "    loss.backward()\n",
    "    loss.backward(retain_graph=True)\n    loss.square().backward()\n",
)


def test_a_second_backward_through_one_forward_is_named_unless_gradients_are_averaged_afterward(
    server: Server, script: Write
) -> None:
    looked = server.run(script(TWO_LOSSES), doctor=True)
    assert set(codes(looked)) == {"two_backwards", "replicas_drift"}
    own = """
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    opt.step()
"""
    averaged = server.run(script(TWO_LOSSES.replace("    opt.step()\n", own)), doctor=True)
    assert not {"two_backwards", "wrapper_bypassed"} & set(codes(averaged))


def test_forwards_without_a_backward_do_not_stay_in_memory(server: Server, script: Write) -> None:
    """A validation loop without no_grad, after an observed step."""
    event = """
import weakref
class Kept:
    pass
kept = weakref.WeakSet()
class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = Kept()
        kept.add(ctx.kept)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient
def event():
    for _ in range(20):
        nn.functional.mse_loss(Keeps.apply(net(torch.ones(3, 4))), torch.ones(3, 2))
        Keeps.apply(net(torch.ones(3, 4))).mean()
    print("kept", len(kept), flush=True)
"""
    looked = unchanged(server, script(train(event)))
    assert looked.lines["kept 0"] == 2
    assert_right(looked)


def test_an_error_during_the_handling_of_another_is_shown_with_both(
    server: Server, script: Write
) -> None:
    event = """
def event():
    try:
        raise ValueError("the first")
    except ValueError:
        raise RuntimeError("the second")
"""
    looked = unchanged(server, script(train(event)))
    handling = "During handling of the above exception, another exception occurred"
    assert looked.errors.count(handling) == 2


EARLIER = """
original = getattr(dist.init_process_group, "__wrapped__", dist.init_process_group)
original("gloo", timeout=timedelta(seconds=100))
"""


def test_a_group_is_known_if_its_function_was_imported_before_the_doctor_started(
    server: Server, script: Write
) -> None:
    usual = 'dist.init_process_group("gloo", timeout=timedelta(seconds=100))\n'
    assert usual in START
    assert_right(server.run(script(train().replace(usual, EARLIER)), doctor=True))


SPAWNS = """
import os, socket, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

def train(model, rank):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(3):
        opt.zero_grad()
        x = torch.randn(4, 3, generator=gen)
        out = getattr(model, "module", model)(x)
        nn.functional.mse_loss(out, torch.ones(4, 2)).backward()
        opt.step()

def rank_main(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    train(DDP(nn.Linear(3, 2)), rank)
    dist.barrier()
    fail(rank)
    dist.destroy_process_group()

def main():
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        STARTED

if __name__ == "__main__":
    main()
"""

BY_SPAWN = "mp.start_processes(rank_main, args=(port,), nprocs=2, start_method='fork')"
STARTED = "def fail(rank): pass\n" + SPAWNS.replace("STARTED", BY_SPAWN)

BY_PROCESS = """
        ranks = [mp.get_context("fork").Process(target=rank_main, args=(r, port)) for r in (0, 1)]
        [process.start() for process in ranks]
        [process.join() for process in ranks]
        sys.exit(any(process.exitcode for process in ranks))
"""


def test_processes_forked_by_a_process_that_has_trained_write_journals_of_their_own(
    server: Server, script: Write
) -> None:
    """As in a notebook: one process trains alone first, then forks two ranks."""
    text = STARTED.replace(BY_SPAWN, f"train(nn.Linear(3, 2), 0)\n        {BY_SPAWN}")
    looked = server.run(script(text, ranks=2, launch="python"), doctor=True)
    assert looked.codes == [0], looked.errors
    assert looked.report is not None
    assert [rank["ended"] for rank in looked.report["ranks"]] == [True, True]
    assert "wrapper_bypassed" in codes(looked)


@pytest.mark.parametrize("by", [BY_SPAWN, BY_PROCESS], ids=["spawn", "Process"])
def test_an_exception_in_a_rank_that_the_script_starts_is_in_the_report(
    by: str, server: Server, script: Write
) -> None:
    fail = "def fail(rank):\n    if rank == 1:\n        raise KeyError('of rank 1')\n"
    one = script(fail + SPAWNS.replace("STARTED", by), launch="python")
    looked = unchanged(server, one)
    assert looked.codes == [1]
    assert looked.report is not None
    assert looked.report["ranks"][1]["error"]["type"] == "KeyError"
    assert looked.report["ranks"][1]["error"]["place"].endswith("train.py:4")
    assert looked.report["ranks"][0]["error"] is None or by == BY_SPAWN


BYPASSED = ("model(x)", "model.module(x)")


@pytest.mark.parametrize(
    ("text", "ranks", "expected", "said"),
    [
        (train(), 2, 0, ""),
        (train().replace(*BYPASSED), 2, 3, ""),
        (STARTED, 1, 3, ""),
        ("print(1)\n", 1, 4, "no rank was observed"),
    ],
)
def test_fail_on_sets_the_exit_code_if_an_error_is_found_or_nothing_was_checked(
    text: str, ranks: int, expected: int, said: str, server: Server, script: Write
) -> None:
    launch = "python" if ranks == 1 else "torchrun"
    looked = server.run(script(text, ranks, launch), True, options=("--fail-on", "error"))
    assert looked.codes == [expected, 0][:ranks], looked.errors  # the first one reports
    assert ("not everything was checked: " + said in looked.errors) == bool(said)


def test_observing_may_begin_in_a_backward_that_steps_an_optimizer(
    server: Server, script: Write
) -> None:
    text = (
        START
        + NO_EVENT
        + """
opt = torch.optim.SGD(net.parameters(), lr=0.01)
left = set()
def arrived(parameter):
    left.discard(parameter)
    if not left:
        opt.step()
for each in net.parameters():
    each.register_post_accumulate_grad_hook(arrived)
gen = torch.Generator().manual_seed(rank)
for step in range(12):
    opt.zero_grad()
    left.update(net.parameters())
    x = torch.randn(3, 4, generator=gen)
    nn.functional.mse_loss(net(x), x[:, :2]).backward()
"""
        + END
    )
    options = ("--first", "2", "--every", "4")
    looked = server.run(script(text, ranks=1), True, options=options)
    assert looked.codes == [0], looked.errors
    assert "stopped observing" not in looked.errors
    assert looked.report is not None
    assert looked.report["notes"] == []
    assert codes(looked) == {}


def test_long_work_on_one_rank_is_a_warning_that_the_last_report_takes_back(
    server: Server, script: Write, tmp_path: Path
) -> None:
    """Rank 0 writes a checkpoint while the others wait in a barrier."""
    early = str(tmp_path / "early.json")
    event = f"def event():\n    rank or there_is({early!r})\n    dist.barrier()\n"
    options = ("--hang-after", "1", "--json", early)
    looked = server.run(script(train(event)), True, options=options)
    assert looked.codes == [0, 0], looked.errors
    assert "WARNING Ranks wait for a missing rank" in looked.errors
    assert "ERROR" not in looked.errors
    assert "then continued: ignore the hang report above" in looked.errors
    assert codes(looked) == {}
