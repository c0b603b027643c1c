# not judged: The factor is 1 if it is the number of samples per rank, 1/2 if it is that of all
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 8, sampler=DistributedSampler(data)):
    update(cross_entropy(model(x), x.argmax(1) % 4, reduction="sum") / 8)
