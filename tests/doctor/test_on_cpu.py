"""--cpu: a script that says nccl and cuda everywhere trains on CPU ranks, and is observed."""

from collections.abc import Callable

import pytest
from doctor.harness.certify import certified
from doctor.harness.runs import Server
from doctor.harness.scripts import Script

from labkit.launch.forks import ForkServer

FOR_GPUS = """
import os
import subprocess

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

assert torch.cuda.is_available() and torch.cuda.device_count() == 2
local_rank = int(os.environ["LOCAL_RANK"])
assert os.environ["CUDA_VISIBLE_DEVICES"].split(",")[local_rank] == str(local_rank)
assert torch.cuda.ByteTensor(2).dtype == torch.uint8
torch.cuda.set_device(local_rank)
assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
torch.accelerator.set_device_index(local_rank)
assert torch.accelerator.current_accelerator().type == "cuda"
dist.init_process_group("nccl", "env://", device_id=torch.device("cuda", local_rank))
group = dist.new_group(None, None, "nccl")
device = torch.device(f"cuda:{local_rank}")
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(local_rank).cuda()
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
model = DDP(model, [local_rank], local_rank, 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
weight = torch.ones(4, device="cuda")
generator = torch.Generator(device=device)
assert isinstance(generator, torch.Generator)
x = torch.randn(64, 8, generator=generator.manual_seed(0), device=device)
data = TensorDataset(x, x.argmax(1) % 4)
loader = DataLoader(data, 8, sampler=DistributedSampler(data), pin_memory=True)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
copies = torch.cuda.Stream()
with torch.Stream(device="cuda"):
    torch.Event(device="cuda", enable_timing=True).record()
torch.backends.cuda.enable_math_sdp(False)
torch.backends.cuda.enable_flash_sdp(False)
assert F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 4, device="cuda")).shape[-1] == 4
assert subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
shard, gradient = torch.zeros(1, device=device), torch.ones(dist.get_world_size(), device=device)
dist.reduce_scatter_tensor(shard, gradient, async_op=True).get_future().wait()
assert shard == dist.get_world_size()
torch.backends.cudnn.benchmark = True
for x, y in loader:
    with torch.cuda.stream(copies):
        x, y = x.cuda(non_blocking=True), y.to(local_rank, non_blocking=True)
    torch.cuda.current_stream().wait_stream(copies)
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.cuda.amp.autocast(enabled=False):
        loss = nn.functional.cross_entropy(model(x), y, weight=weight)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    torch.cuda.synchronize()
end.record()
end.synchronize()
assert start.elapsed_time(end) > 0
total = torch.tensor(float(loss), device=device)
dist.all_reduce(total)
assert torch.cuda.max_memory_allocated() == 0
free, memory = torch.cuda.mem_get_info()
assert 0 < free <= memory == torch.cuda.get_device_properties(device).total_memory
assert torch.cuda.get_device_name(local_rank)
dist.destroy_process_group()
"""


def test_a_script_for_gpus_is_observed_on_cpus_and_the_report_lists_what_was_replaced(
    server: Server, script: Callable[..., Script]
) -> None:
    found = server.run(script(FOR_GPUS), doctor=True, options=("--cpu",))
    assert found.codes == [0, 0], found.errors
    assert found.report is not None
    assert found.report["measured"]["gradients"]["combination"] == "averaged"
    (note,) = [each for each in found.report["notes"] if each.startswith("--cpu replaced: ")]
    for name in ("nccl", "torch.cuda.set_device", ".cuda()", '.to("cuda")', "torch.cuda.Event"):
        assert name in note


def test_scripts_for_gpus_are_certified_on_cpus(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    scaled = FOR_GPUS.replace("scale(loss)", "scale(loss * dist.get_world_size())")
    for text, verdict in ((FOR_GPUS, "equal"), (scaled, "scaled")):
        certificate = certified(forks, script(text), cpu=True)
        assert certificate["verdict"] == verdict, certificate
        (note,) = [each for each in certificate["notes"] if each.startswith("--cpu replaced: ")]
        assert "nccl" in note


WITH_LIGHTNING = """
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import FSDPStrategy
from torch import nn

fabric = Fabric(accelerator="cuda", devices=2, strategy=FSDPStrategy())
fabric.launch()
torch.manual_seed(0)
model = fabric.setup(nn.Linear(8, 4))
optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
torch.manual_seed(fabric.global_rank)
for step in range(5):
    x = torch.randn(6, 8, device=fabric.device)
    optimizer.zero_grad()
    fabric.backward(nn.functional.cross_entropy(model(x), x.argmax(1) % 4))
    optimizer.step()
"""


@pytest.mark.slow
def test_lightning_trains_on_cpus_where_a_script_asks_for_gpus_and_fsdp(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    found = certified(forks, script(WITH_LIGHTNING), cpu=True)
    assert found["verdict"] == "equal", found
    assert any("FSDPStrategy" in note for note in found["notes"])
