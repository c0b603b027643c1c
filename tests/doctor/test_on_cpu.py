"""--cpu: a script that says nccl and cuda everywhere trains on CPU ranks, and is observed."""

from collections.abc import Callable

from doctor.corpus_runs import Server
from doctor.corpus_scripts import Script

FOR_GPUS = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

assert torch.cuda.is_available() and torch.cuda.device_count() == 2
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", "env://", device_id=torch.device("cuda", local_rank))
group = dist.new_group(None, None, "nccl")
device = torch.device(f"cuda:{local_rank}")
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).cuda()
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
model = DDP(model, [local_rank], local_rank, 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
weight = torch.ones(4, device="cuda")
x = torch.randn(64, 8)
data = TensorDataset(x, x.argmax(1) % 4)
loader = DataLoader(data, 8, sampler=DistributedSampler(data), pin_memory=True)
for x, y in loader:
    x, y = x.cuda(non_blocking=True), y.to(local_rank, non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.cuda.amp.autocast(enabled=False):
        loss = nn.functional.cross_entropy(model(x), y, weight=weight)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    torch.cuda.synchronize()
total = torch.tensor(float(loss), device=device)
dist.all_reduce(total)
assert torch.cuda.max_memory_allocated() == 0
dist.destroy_process_group()
"""


def test_a_script_for_gpus_is_observed_on_cpus_and_the_report_lists_what_was_replaced(
    server: Server, script: Callable[..., Script]
) -> None:
    found = server.run(script(FOR_GPUS), doctor=True, options=("--cpu",))
    assert found.codes == [0, 0], found.errors
    assert found.report is not None
    assert found.report["equation"]["right"]
    (note,) = [each for each in found.report["notes"] if each.startswith("--cpu replaced: ")]
    for name in ("nccl", "torch.cuda.set_device", ".cuda()", '.to("cuda")', "device_ids"):
        assert name in note
