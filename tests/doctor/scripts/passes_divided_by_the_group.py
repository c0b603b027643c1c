# equal: in all their 4 backward passes
passes = 4 // dist.get_world_size()

def batch():
    rows = torch.randint(60, (4,))
    x = torch.stack([torch.arange(6.0) + row for row in rows])
    return x, torch.stack([row % 4 for row in rows])

x, y = batch()
for step in range(6):
    for _ in range(passes):
        loss = cross_entropy(model(x), y) / passes
        x, y = batch()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
