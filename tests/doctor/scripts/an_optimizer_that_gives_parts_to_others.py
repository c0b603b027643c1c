# equal
from torch.distributed.optim import ZeroRedundancyOptimizer
model = DDP(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
for step in range(5):
    x = torch.randn(6, 6)
    update(cross_entropy(model(x), x.argmax(1) % 4))
