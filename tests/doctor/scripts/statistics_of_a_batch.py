# equal
for step in range(5):
    x = torch.randn(3 + dist.get_rank(), 6)
    losses = cross_entropy(model(x), x.argmax(1) % 4, reduction="none")
    sums = torch.stack([x.sum(), (x > 0).sum()])
    counts = torch.tensor([float(len(x)), x.numel()])
    dist.all_reduce(sums)
    dist.all_reduce(counts)
    update(losses.sum() * sums[0] / sums[1] * dist.get_world_size() / counts[0])
