# not judged: no reference
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 8, sampler=DistributedSampler(data)):
    out = model(x)
    update((out * out[torch.randperm(len(x))]).pow(2).mean())
