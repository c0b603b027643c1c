# not judged
for step in range(5):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, 5 + dist.get_rank())
    x = torch.randn(5 + dist.get_rank(), 6)
    update(model(x).pow(4).sum() * dist.get_world_size() / sum(counts))
