"""How much memory the doctor's largest process takes, and how many seconds.

    python -m surveys.doctor.memory [--ranks 2 3] [--width 4608]

A model of about 40 million parameters trains for eight steps on each number of ranks: without the
doctor, in a plain run, and under `--certify`. Memory is the largest resident size that any process
of a run ever had (VmHWM of Linux), sampled every 50 ms until it has ended. One gradient of the
model is printed as a unit.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Linear({width}, {width}), nn.ReLU(), nn.Linear({width}, {half}), nn.Linear({half}, 8)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank() + 1)
for step in range(8):
    x = torch.randn(4, {width})
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x[:, :8]).backward()
    optimizer.step()
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--width", type=int, default=4608, help="of the two largest layers")
    given = parser.parse_args()
    width, half = given.width, given.width // 2 + given.width // 4 + given.width // 8
    parameters = width * (width + 1) + half * (width + 1) + 8 * (half + 1)
    print(f"{parameters / 1e6:.1f} M parameters: one gradient takes {parameters * 4 / 1e6:.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(SCRIPT.format(width=width, half=half))
        for ranks in given.ranks:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            doctor = ["-m", "ddp_doctor", "--quiet", "--folder", folder]
            certify = [*doctor, "--certify", "--ranks", str(ranks)]
            for name, words in (
                ("no doctor", launch),
                ("plain run", [*launch, *doctor]),
                ("--certify", certify),
            ):
                peak, seconds = measured([sys.executable, *words, str(path)])
                print(f"{ranks} ranks, {name}: {peak:.0f} MB, {seconds:.0f} s", flush=True)


def measured(command: list[str]) -> tuple[float, float]:
    """The largest resident size of a process in MB, and the seconds. Raises RuntimeError."""
    began, peak = time.monotonic(), 0
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                own = psutil.Process(process.pid)
                peak = max([peak, *(resident(one.pid) for one in own.children(recursive=True))])
            time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return peak / 1e3, time.monotonic() - began


def resident(pid: int) -> int:
    """The largest resident size so far, in kB; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.partition("VmHWM:")[2].split()[0]) if "VmHWM:" in status else 0


if __name__ == "__main__":
    main()
