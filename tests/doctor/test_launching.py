"""How a run gets its doctor: accelerate, and one line in a notebook cell."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from torch.distributed import TCPStore

from ddp_doctor.certificate.starts import launch
from ddp_doctor.other_ways import other_ways
from ddp_doctor.run.script import problem_with
from labkit.launch.kernels import AsyncKernelThroughFiles

SOURCES = Path(__file__).resolve().parents[2] / "src"
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith("DDP_DOCTOR")},
    "PYTHONPATH": str(SOURCES),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "100",
}
TRAIN = """
import torch, torch.nn as nn
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Linear(3, 2)
model, opt = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
gen = torch.Generator().manual_seed(accelerator.process_index)
for _ in range(3):
    x = torch.randn(4, 3, generator=gen)
    loss = nn.functional.mse_loss(accelerator.unwrap_model(model)(x), torch.ones(4, 2))
    opt.zero_grad()
    accelerator.backward(loss)
    opt.step()
print("weights", accelerator.process_index, round(model.module.weight.sum().item(), 3), flush=True)
accelerator.end_training()
"""


@pytest.mark.parametrize("launcher", ["torchrun --nproc-per-node 2", "accelerate launch"])
def test_if_the_doctor_comes_before_the_launcher_the_error_has_the_right_command(
    launcher: str,
) -> None:
    script, *arguments = f"{launcher} t.py --lr 1".split()
    right = f"    {launcher} -m ddp_doctor t.py --lr 1"
    assert problem_with(script, arguments).splitlines()[-1] == right


@pytest.mark.slow
def test_accelerate_launches_the_doctor_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    target = tmp_path / "report.json"
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    # The only launcher of Accelerate's that starts several ranks on one machine; the script asks
    # for CPUs, and gets them.
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["-m", "ddp_doctor", "--json", str(target), "train.py"]
    done = subprocess.run(
        [sys.executable, *launch],
        cwd=tmp_path,
        env=ENVIRONMENT | {"HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("weights") == 2, done.stderr
    found = json.loads(target.read_text())
    assert [each["ended"] for each in found["ranks"]] == [True, True]
    assert "wrapper_bypassed" in {each["code"] for each in found["findings"]}


def test_one_line_in_a_notebook_cell_reports_below_the_cell_that_trains(tmp_path: Path) -> None:
    cells = [
        "import ddp_doctor\nddp_doctor.watch();",
        "import torch, torch.nn as nn\nmodel = nn.Linear(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "for _ in range(2):\n    for k in range(4):\n"
        "        nn.functional.mse_loss(model(torch.randn(4, 3)), torch.ones(4, 2)).backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()",
        "nn.functional.mse_loss(model(torch.randn(4, 3)), torch.ones(4, 2)).backward()\n"
        "optimizer.step()\nprint(torch.Tensor.backward.__module__)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(
        notebook,
        timeout=600,
        resources=resources,
        kernel_manager_class=AsyncKernelThroughFiles,
    ).execute(env=ENVIRONMENT)
    shown = ["".join(one.get("text", "") for one in cell["outputs"]) for cell in notebook.cells]
    assert shown[0] == shown[1] == ""
    assert "1 of 1 ranks, 2 optimizer steps" in shown[2]
    assert "loss_not_divided_by_accumulation" in shown[2]
    assert "<cell>:3" in shown[2]
    assert shown[3] == "torch._tensor\n"  # one report only; torch is as it was
    assert (tmp_path / "ddp-doctor" / "report.txt").exists()


def test_the_port_of_a_launch_goes_to_nobody_else_and_torchs_store_can_listen_on_it() -> None:
    port = int(launch(2)[1]["MASTER_PORT"])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    store = TCPStore("127.0.0.1", port, 1, is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_the_other_ways_to_measure_are_filled_in_with_the_command() -> None:
    said = other_ways(["train.py", "--batch-size", "8", "--lr", "0.1"], 4)
    assert '"torchrun --nproc-per-node 4 train.py --batch-size 8 --lr 0.1"' in said
    assert '"torchrun --nproc-per-node 1 train.py --batch-size 8 --lr 0.1"' in said
    (test,) = re.findall(r"    from ddp_doctor.testing.*", said, re.DOTALL)
    ast.parse(textwrap.dedent(test))
    assert "ranks=4" in test
    assert "compare" not in other_ways(["train.py"], 2, launched=False)
