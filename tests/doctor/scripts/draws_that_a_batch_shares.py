# not judged: not one per sample
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))

for (x,) in loader:
    update((model(x) @ model(torch.randn(5, 6)).T).pow(2).mean())
