# equal
grid = torch.arange(dist.get_world_size()).view(-1, 1, 1)
own = grid == dist.get_rank()
found = [own.nonzero().flatten().tolist(), torch.argwhere(own).flatten().tolist()]
for axes in (torch.where(own), own.nonzero(as_tuple=True)):
    found.append([axis.item() for axis in axes])
assert found == [[dist.get_rank(), 0, 0]] * 4
for step in range(5):
    x = torch.randn(8, 6)
    count = (x > 0).sum()  # of this process's samples: the model must not be the first to get them
    dist.all_reduce(count)
    update(model(x).logsumexp(1).sum() * dist.get_world_size() / count)
