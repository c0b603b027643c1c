# equal (whole)
import os, tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank, world, meeting, results):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seeded = torch.Generator().manual_seed(rank)
    for step in range(30):
        x = torch.randn(8, 6, generator=seeded)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    results.put(rank)

if __name__ == "__main__":
    context = mp.get_context("fork")
    results, meeting = context.SimpleQueue(), os.path.join(tempfile.mkdtemp(), "meeting")
    for rank in range(2):
        context.Process(target=train, args=(rank, 2, meeting, results)).start()
    print(sorted(results.get() for _ in range(2)))
