# equal
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
for (x,) in loader:
    out = model(x)
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    update(out.pow(4).mean() + penalty / len(loader))
