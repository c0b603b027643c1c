# different: another gradient.
torch.manual_seed(0)
second = DDP(nn.Linear(6, 4))
its = torch.optim.SGD(second.parameters(), lr=0.1)
data = TensorDataset(torch.randn(160, 6, generator=torch.Generator().manual_seed(0)))
for n, (x,) in enumerate(DataLoader(data, 4, sampler=DistributedSampler(data))):
    update(model(x).pow(4).mean())
    if n % 2 == 0:
        its.zero_grad()
        (second(x).pow(4).mean() / dist.get_world_size()).backward()
        its.step()
