# doctor: expect=mismatched_collectives ranks=2 launch=torchrun
# measured: rank 0 waits in all_reduce, rank 1 in broadcast, until both time out
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=6))
rank = dist.get_rank()
torch.manual_seed(0)
weights = torch.nn.Linear(3, 3)
loss_sum, best = torch.ones(1), torch.zeros(2)
if rank == 0:
    dist.all_reduce(loss_sum)
    dist.broadcast(best, src=1)
else:
    dist.barrier()
    dist.all_reduce(loss_sum)
print("finished", rank)
