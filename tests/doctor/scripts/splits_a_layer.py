# equal (head only)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    x = torch.randn(6, 4)
    update(nn.functional.mse_loss(net(x), x[:, :2]))
