# equal
data = TensorDataset(*torch.randn(2, 96, 6, generator=torch.Generator().manual_seed(0)))
for first, second in DataLoader(data, 6, sampler=DistributedSampler(data)):
    one, other = model(torch.cat([first, second])).chunk(2)
    update((one * other).pow(2).mean())
