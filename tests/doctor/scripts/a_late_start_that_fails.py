# not judged: Expected input batch_size (8) to match target batch_size (4)
rank, common = dist.get_rank(), torch.Generator().manual_seed(0)
for step in range(6):
    every = [torch.empty(2, 4, 6), torch.empty(2, 4, dtype=torch.long)]
    if rank == 0:
        every = [torch.randn(2, 4, 6, generator=common), torch.randint(4, (2, 4))]
    for part in every:
        dist.broadcast(part, 0)
    x, y = (part[rank] for part in every)
    losses = cross_entropy(model(x), y, reduction="none")
    update(losses.sum() / 4)
