# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient equals that of one process with the whole batch
"""Ridge regression by hand: half the squared error, divided by all rows; the all-reduce sums."""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
gen = torch.Generator().manual_seed(0)
X, y = torch.randn(40, 5, generator=gen), torch.randn(40, generator=gen)
N = len(X)
X, y = X[rank::world], y[rank::world]
w = torch.zeros(5, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.1)
for step in range(6):
    opt.zero_grad()
    loss = 0.5 * ((X @ w - y) ** 2).sum() / N
    loss.backward()
    dist.all_reduce(w.grad)
    opt.step()
print(rank, f"{w.sum().item():.6f}")
dist.destroy_process_group()
