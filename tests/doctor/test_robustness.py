"""What happens to a run does not depend on the doctor, and the doctor survives what happens."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor.corpus_runs import Outcome, Server
from doctor.corpus_scripts import Script

Write = Callable[..., Script]

START = """
import os, resource, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", timeout=timedelta(seconds=12))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
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


def both(server: Server, one: Script, *options: str) -> tuple[Outcome, Outcome]:
    return server.run(one, doctor=True, options=options), server.run(one, doctor=False)


def codes(outcome: Outcome) -> dict[str, str]:
    assert outcome.report is not None, outcome.errors
    return {each["code"]: each["evidence"] for each in outcome.report["findings"]}


def test_a_rank_killed_with_signal_9_is_named_in_the_report(server: Server, script: Write) -> None:
    event = "def event():\n    if rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    looked, plain = both(server, script(START + event + LOOP + END))
    assert looked.codes[1] == plain.codes[1] == -9
    assert "rank 1 ended unexpectedly" in codes(looked)["hang_missing_rank"]


def test_after_ctrl_c_there_is_a_report_and_the_same_exit_code(
    server: Server, script: Write
) -> None:
    event = "def event():\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\n"
    looked, plain = both(server, script(START + event + LOOP + END))
    assert looked.codes == plain.codes
    assert looked.same(plain)
    assert looked.report is not None
    assert looked.report["steps"]["taken"] == 3


def test_a_full_disk_ends_the_journal_and_not_the_run(server: Server, script: Write) -> None:
    event = "def event():\n    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    looked, plain = both(server, script(START + event + LOOP + END))
    assert looked.same(plain)
    assert looked.codes == [0, 0]
    assert looked.errors.count("stopped observing (OSError") == 2


def test_an_unwritable_folder_sends_the_report_elsewhere(server: Server, script: Write) -> None:
    event = "def event():\n    pass\n"
    one = script(START + event + LOOP + END)
    looked, plain = both(server, one, "--folder", "/proc/ddp-doctor")
    assert looked.same(plain)
    assert "cannot write to /proc/ddp-doctor" in looked.errors
    assert looked.report is not None


def test_a_script_that_leaves_by_os_exit_keeps_its_code_and_gets_a_report(
    server: Server, script: Write
) -> None:
    event = "def event():\n    pass\n"
    looked, plain = both(server, script(START + event + LOOP + "dist.barrier()\nos._exit(7)\n"))
    assert looked.codes == plain.codes == [7, 7]
    assert looked.same(plain)
    assert looked.report is not None
    assert codes(looked) == {}


def test_a_scripts_own_excepthook_is_called_once(server: Server, script: Write) -> None:
    event = """
def hook(kind, value, trace):
    print("own hook", kind.__name__, value, flush=True)
sys.excepthook = hook
def event():
    raise ValueError(f"of rank {rank}")
"""
    looked, plain = both(server, script(START + event + LOOP + END))
    assert looked.same(plain)
    assert looked.lines["own hook ValueError of rank 1"] == 1
    assert looked.report is not None
    assert looked.report["ranks"][1]["error"]["text"] == "of rank 1"


def test_a_compiled_model_computes_the_same_and_is_understood(
    server: Server, script: Write
) -> None:
    event = "net = torch.compile(net, backend='aot_eager')\ndef event():\n    pass\n"
    looked, plain = both(server, script(START + event + LOOP + END))
    assert looked.codes == [0, 0], looked.errors
    assert looked.same(plain)
    assert looked.report is not None
    assert looked.report["equation"]["right"], looked.report["equation"]


def test_eight_ranks_are_merged(server: Server, script: Write) -> None:
    event = "def event():\n    pass\n"
    looked = server.run(script(START + event + LOOP + END, ranks=8), doctor=True)
    assert looked.codes == [0] * 8, looked.errors
    assert looked.report is not None
    assert len(looked.report["ranks"]) == 8
    assert looked.report["equation"]["combination_factor"] == pytest.approx(1 / 8)
    assert codes(looked) == {}


def test_a_hang_is_reported_while_the_ranks_are_still_stuck(
    server: Server, script: Write, tmp_path: Path
) -> None:
    early = tmp_path / "early.json"
    event = f"""
def event():
    if rank == 1:
        until = time.monotonic() + 11
        while time.monotonic() < until:
            if os.path.exists({str(early)!r}) and os.path.getsize({str(early)!r}):
                print("reported while stuck", flush=True)
                break
            time.sleep(0.05)
        os._exit(3)
    dist.all_reduce(torch.ones(1))
"""
    one = script(START + event + LOOP + END)
    # The second --json wins: the test watches that file while rank 0 waits in its all-reduce.
    outcome = server.run(one, True, options=("--hang-after", "2", "--json", str(early)))
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
    looked, plain = both(server, script(START + event + LOOP + END))
    assert looked.codes == [0, 0]
    assert looked.same(plain)
    assert looked.errors.count("Your run goes on.") == 2


def test_fail_on_sets_the_exit_code_and_only_then(server: Server, script: Write) -> None:
    event = "def event():\n    pass\n"
    broken = (START + event + LOOP + END).replace("model(x)", "model.module(x)")
    assert server.run(script(broken), doctor=True).codes == [0, 0]
    assert server.run(script(broken), True, options=("--fail-on", "error")).codes == [3, 3]
    clean = script(START + event + LOOP + END)
    assert server.run(clean, True, options=("--fail-on", "warning")).codes == [0, 0]


def test_the_report_follows_the_end_of_the_run_at_once(server: Server, script: Write) -> None:
    event = "def event():\n    pass\n"
    started = time.monotonic()
    looked = server.run(script(START + event + LOOP + END), doctor=True)
    waited = time.monotonic() - started - looked.seconds
    assert looked.report is not None
    assert waited < 6.0  # 0.4 s on an idle machine


NO_EVENT = "def event():\n    pass\n"


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
"""
    text = START + event + LOOP.replace("step == 3", "step == 1") + END
    looked, plain = both(server, script(text))
    assert looked.codes == [0, 0], looked.errors
    assert looked.same(plain)
    assert codes(looked) == {}
    assert looked.report is not None
    assert looked.report["equation"]["right"], looked.report["equation"]


def test_a_wrapper_that_was_made_and_dropped_is_named(server: Server, script: Write) -> None:
    text = (START + NO_EVENT + LOOP + END).replace("model = DDP(net)", "DDP(net)\nmodel = net")
    looked, plain = both(server, script(text))
    assert looked.same(plain)
    assert "no longer exists" in codes(looked)["wrapper_lost"]
    assert "wrapper_bypassed" not in codes(looked)


def test_a_wrapper_of_another_library_is_recognized_by_what_it_has(
    server: Server, script: Write
) -> None:
    """MiniDDP is neither imported by the doctor nor a subclass of torch's wrapper."""
    text = (START + NO_EVENT + LOOP + END).replace(
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "from miniddp import MiniDDP as DDP",
    )
    looked, plain = both(server, script(text))
    assert looked.codes == [0, 0], looked.errors
    assert looked.same(plain)
    assert looked.report is not None
    assert looked.report["equation"]["right"], looked.report["equation"]
    assert looked.report["equation"]["combination_factor"] == pytest.approx(1 / 2)
    assert codes(looked) == {}
    bypassed = server.run(script(text.replace("model(x)", "model.module(x)")), doctor=True)
    assert "no forward went through the wrapper" in codes(bypassed)["wrapper_bypassed"]


TWO_LOSSES = (START + NO_EVENT + LOOP + END).replace(
    "    loss.backward()\n",
    "    loss.backward(retain_graph=True)\n    loss.square().backward()\n",
)


def test_a_second_backward_through_one_forward_is_named_and_not_taken_for_a_bypassed_wrapper(
    server: Server, script: Write
) -> None:
    looked, plain = both(server, script(TWO_LOSSES))
    assert looked.codes == [0, 0], looked.errors
    assert looked.same(plain)
    assert set(codes(looked)) == {"two_backwards", "replicas_drift"}
    assert "Step 0, rank 0: a second backward" in codes(looked)["two_backwards"]
    assert "4 of 4 gradients differ" in codes(looked)["two_backwards"]


def test_two_backwards_whose_gradients_are_averaged_afterward_are_right(
    server: Server, script: Write
) -> None:
    own = """
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    opt.step()
"""
    looked, plain = both(server, script(TWO_LOSSES.replace("    opt.step()\n", own)))
    assert looked.codes == [0, 0], looked.errors
    assert looked.same(plain)
    assert "two_backwards" not in codes(looked)
    assert "wrapper_bypassed" not in codes(looked)


def test_a_forward_around_the_wrapper_is_named_also_after_one_through_it(
    server: Server, script: Write
) -> None:
    text = TWO_LOSSES.replace("retain_graph=True", "").replace(
        "loss.square().backward()", "nn.functional.mse_loss(net(x), x[:, :2]).backward()"
    )
    looked, plain = both(server, script(text))
    assert looked.codes == [0, 0], looked.errors
    assert looked.same(plain)
    assert set(codes(looked)) == {"wrapper_bypassed", "replicas_drift"}


def test_a_clip_written_by_hand_does_not_change_the_equation(server: Server, script: Write) -> None:
    clip = """
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(0.01 / norm)
"""
    text = (START + NO_EVENT + LOOP + END).replace(
        "    loss.backward()\n", "    loss.backward()" + clip
    )
    looked, plain = both(server, script(text))
    assert looked.same(plain)
    assert codes(looked) == {}
    assert looked.report is not None
    assert looked.report["equation"]["right"], looked.report["equation"]


def test_processes_forked_by_a_process_that_has_trained_write_journals_of_their_own(
    server: Server, script: Write
) -> None:
    """As in a notebook: one process trains alone first, then forks two ranks."""
    text = """
import os, socket, torch, torch.distributed as dist, torch.multiprocessing as mp, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

def train(model, rank):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(3):
        opt.zero_grad()
        inner = getattr(model, "module", model)
        nn.functional.mse_loss(inner(torch.randn(4, 3, generator=gen)), torch.ones(4, 2)).backward()
        opt.step()

def rank_main(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    train(DDP(nn.Linear(3, 2)), rank)
    dist.barrier()
    dist.destroy_process_group()

train(nn.Linear(3, 2), 0)
with socket.socket() as holder:  # bound, so that nobody else is given the port
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    mp.start_processes(rank_main, args=(port,), nprocs=2, start_method="fork")
"""
    looked = server.run(script(text, ranks=2, launch="python"), doctor=True)
    assert looked.codes == [0], looked.errors
    assert looked.report is not None
    assert [each["ended"] for each in looked.report["ranks"]] == [True, True]
    assert "wrapper_bypassed" in codes(looked)


def test_a_backward_that_fails_because_the_other_rank_has_left_is_said_to_wait(
    server: Server, script: Write
) -> None:
    event = "def event():\n    if rank == 1:\n        os._exit(0)\n"
    looked = server.run(script(START + event + LOOP + END), doctor=True)
    assert "Rank 0 waits in backward" in codes(looked)["hang_missing_rank"]


def test_a_group_that_a_script_destroyed_keeps_its_threads_until_the_rank_ends(
    server: Server, script: Write
) -> None:
    """Otherwise the wrapper's destructor joins them, and can wait for one of them forever."""
    threads = "print('threads', len(os.listdir('/proc/self/task')), flush=True)\n"
    text = START + LOOP.replace("event()", "pass") + END + "del model\n" + threads
    outcome = server.run(script(text), doctor=False)
    assert outcome.codes == [0, 0], outcome.errors
    counts = [int(line.split()[1]) for line in outcome.lines.elements() if "threads" in line]
    assert len(counts) == 2
    assert min(counts) > 1


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
    looked, plain = both(server, script(START + event + LOOP + END))
    assert looked.codes == [0, 0], looked.errors
    assert plain.lines["kept 0"] == 2
    assert looked.same(plain)
    assert looked.report is not None
    assert looked.report["equation"]["right"], looked.report["equation"]


def test_a_backward_that_fails_leaves_no_hook_behind(server: Server, script: Write) -> None:
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
    print("hooks", [len(p._backward_hooks or ()) for p in net.parameters()], flush=True)
"""
    looked, plain = both(server, script(START + event + LOOP + END))
    assert looked.codes == [0, 0], looked.errors
    assert looked.same(plain)


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
    looked, plain = both(server, script(START + event + LOOP + END))
    assert looked.same(plain)
    handling = "During handling of the above exception, another exception occurred"
    assert plain.errors.count(handling) == looked.errors.count(handling) == 2


EARLIER = """
original = getattr(dist.init_process_group, "__wrapped__", dist.init_process_group)
original("gloo", timeout=timedelta(seconds=12))
"""
MESH = "dist.init_device_mesh('cpu', (2,))\n"


@pytest.mark.parametrize(
    "made", [EARLIER, MESH], ids=["a name imported before the doctor started", "a device mesh"]
)
def test_a_group_is_known_however_it_was_made(made: str, server: Server, script: Write) -> None:
    usual = 'dist.init_process_group("gloo", timeout=timedelta(seconds=12))\n'
    assert usual in START
    text = (START + NO_EVENT + LOOP + END).replace(usual, made)
    looked, plain = both(server, script(text))
    assert looked.codes == [0, 0], looked.errors
    assert looked.same(plain)
    assert codes(looked) == {}
    assert looked.report is not None
    assert [each["rank"] for each in looked.report["ranks"]] == [0, 1]


SPAWNS = """
import os, socket, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

def rank_main(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(nn.Linear(3, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(3):
        opt.zero_grad()
        x = torch.randn(4, 3, generator=gen)
        nn.functional.mse_loss(model.module(x), torch.ones(4, 2)).backward()
        opt.step()
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
BY_PROCESS = """
        ranks = [mp.get_context("fork").Process(target=rank_main, args=(r, port)) for r in (0, 1)]
        [each.start() for each in ranks]
        [each.join() for each in ranks]
        sys.exit(any(each.exitcode for each in ranks))
"""


@pytest.mark.parametrize("by", [BY_SPAWN, BY_PROCESS], ids=["spawn", "Process"])
def test_an_exception_in_a_rank_that_the_script_starts_is_in_the_report(
    by: str, server: Server, script: Write
) -> None:
    fail = "def fail(rank):\n    if rank == 1:\n        raise KeyError('of rank 1')\n"
    one = script(fail + SPAWNS.replace("STARTED", by), launch="python")
    looked, plain = both(server, one)
    assert looked.same(plain)
    assert looked.codes == [1]
    assert looked.report is not None
    assert looked.report["ranks"][1]["error"]["type"] == "KeyError"
    assert looked.report["ranks"][1]["error"]["place"].endswith("train.py:4")
    assert looked.report["ranks"][0]["error"] is None or by == BY_SPAWN


def test_fail_on_looks_at_ranks_that_the_script_starts(server: Server, script: Write) -> None:
    text = "def fail(rank): pass\n" + SPAWNS.replace("STARTED", BY_SPAWN)
    broken = script(text, launch="python")
    assert server.run(broken, True, options=("--fail-on", "error")).codes == [3]
    right = script(text.replace("model.module(x)", "model(x)"), launch="python")
    assert server.run(right, True, options=("--fail-on", "error")).codes == [0]


def test_fail_on_does_not_pass_if_nothing_was_observed(server: Server, script: Write) -> None:
    looked = server.run(script("print(1)\n", 1, "python"), True, options=("--fail-on", "error"))
    assert looked.codes == [4]
    assert "nothing was checked, because no rank was observed" in looked.errors


def test_fail_on_does_not_pass_if_the_doctor_stopped_or_saw_no_step(
    server: Server, script: Write
) -> None:
    stops = """
def event():
    recorder = sys.modules["ddp_doctor.observe.recorder"]
    recorder.Recorder.before_update = None
"""
    text = START + stops + LOOP.replace("step == 3", "step == 1") + END
    looked = server.run(script(text), True, options=("--fail-on", "error"))
    assert looked.codes == [4, 4]
    assert "nothing was checked, because the doctor stopped on a rank" in looked.errors
    looked = server.run(script(START + END), True, options=("--fail-on", "error"))
    assert looked.codes == [4, 4]
    assert "because no optimizer step was observed on all ranks" in looked.errors


def test_nothing_is_said_after_help_or_an_error_before_training(
    server: Server, script: Write
) -> None:
    for text, code in (("import argparse\nargparse.ArgumentParser().parse_args(['-h'])\n", 0),
                       ("import no_such_module\n", 1)):  # fmt: skip
        looked = server.run(script(text, 1, "python"), doctor=True)
        assert looked.codes == [code]
        assert "ddp-doctor:" not in looked.errors


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
    server: Server, script: Write
) -> None:
    """Rank 0 writes a checkpoint while the others wait in a barrier."""
    event = "def event():\n    time.sleep(4 if rank == 0 else 0)\n    dist.barrier()\n"
    one = script(START + event + LOOP + END)
    looked = server.run(one, doctor=True, options=("--hang-after", "1"))
    assert looked.codes == [0, 0], looked.errors
    assert "WARNING Ranks wait for a missing rank" in looked.errors
    assert "ERROR" not in looked.errors
    assert "then continued: ignore the hang report above" in looked.errors
    assert codes(looked) == {}
