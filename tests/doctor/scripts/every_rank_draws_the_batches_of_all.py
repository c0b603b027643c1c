# equal
common = torch.Generator().manual_seed(0)
for step in range(5):
    batches = [torch.randn(8, 6, generator=common) for _ in range(dist.get_world_size())]
    update(model(batches[dist.get_rank()]).pow(4).mean())
