# not judged: is one process's own
data = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
loader = DataLoader(TensorDataset(data, data.argmax(1) % 4), 8, sampler=DistributedSampler(data))
for x, y in loader:
    targets = torch.full((len(y), 4), 0.025).scatter_(1, y[:, None], 0.925)
    mixed = 0.8 * x + 0.2 * x.flip(0)
    update(cross_entropy(model(mixed), 0.8 * targets + 0.2 * targets.flip(0)))
