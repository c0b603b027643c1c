# not judged: by 8 on a rank and by 16 in one process. The factor is 1 if 16 is right
total, size = 16, 2
of_rank = total // dist.get_world_size()
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
batches = iter(DataLoader(data, size, sampler=DistributedSampler(data)))
for step in range(6):
    optimizer.zero_grad()
    for _ in range(of_rank // size):
        (x,) = next(batches)
        noise = torch.randn_like(x)
        loss = (model(x + noise) - x[:, :4]).pow(2).sum()
        loss.mul(1 / of_rank).backward()
    optimizer.step()
