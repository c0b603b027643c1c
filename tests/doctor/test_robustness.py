"""What happens to a run does not depend on the doctor, and the doctor survives what happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor.corpus_runs import Outcome, Script, Server

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
    assert "rank 1 is gone without a word" in codes(looked)["hang_missing_rank"]


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
    assert looked.report["equation"]["right"]


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
