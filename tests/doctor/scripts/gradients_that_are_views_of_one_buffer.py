# equal
model = model.module
flat = [torch.zeros(p.numel()) for p in model.parameters()]
for p, part in zip(model.parameters(), flat):
    p.grad = part.view_as(p)
for step in range(6):
    x = torch.randn(8, 6)
    cross_entropy(model(x), x.argmax(1) % 4).backward()
    for part in flat:
        dist.all_reduce(part)
        part /= dist.get_world_size()
    optimizer.step()
    for part in flat:
        part.zero_()
