# not judged: other values in one process
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))

torch.seed()
model = DDP(nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 4)))
optimizer = torch.optim.SGD(model.module[1].parameters(), lr=0.1)
for (x,) in loader:
    update(model(x).pow(4).mean())
