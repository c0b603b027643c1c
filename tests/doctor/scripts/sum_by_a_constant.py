# equal if: the number of rows of the losses on each rank
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 8, sampler=DistributedSampler(data)):
    update(cross_entropy(model(x), x.argmax(1) % 4, reduction="sum") / 8)
