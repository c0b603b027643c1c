# different
model.module.micro = 0
for _ in range(80):
    x = torch.randn(8, 6)
    kept = (x[:, 0] > 0.3).float()
    model.module.micro += 1
    count = kept.sum()
    dist.all_reduce(count)
    mean = ((model(x) ** 2).sum(1) * kept).sum() * dist.get_world_size() / count.clamp(min=1)
    (mean / 4).backward()
    if model.module.micro % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
