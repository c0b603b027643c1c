# equal if: it is the mean over all 16 rows of the losses
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 8, sampler=DistributedSampler(data)):
    update(cross_entropy(model(x), x.argmax(1) % 4, reduction="sum") / 8)
