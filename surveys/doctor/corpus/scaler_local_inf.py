# doctor: expect=scaler_scales_differ ranks=2 launch=torchrun
# measured: the scales are 32768 and 65536 after the third step
import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
gen = torch.Generator().manual_seed(rank)
for step in range(5):
    x = torch.randn(8, 4, generator=gen)
    if step == 2 and rank == 0:
        x[0, 0] = float("inf")
    loss = nn.functional.mse_loss(model(x), x[:, :2].nan_to_num(posinf=1.0))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        grad = p.grad.nan_to_num(0.0, 0.0, 0.0)
        dist.all_reduce(grad, op=dist.ReduceOp.AVG) if hasattr(dist.ReduceOp, "AVG") else None
        p.grad.copy_(grad)
    scaler.step(optimizer)
    scaler.update()
print(rank, scaler.get_scale())
dist.destroy_process_group()
