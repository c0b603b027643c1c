# scaled: W = 2 times
targets = torch.arange(4).repeat(2)
for step in range(6):
    x = torch.randn(8, 6) + targets[:, None]
    update(cross_entropy(model(x), targets) * dist.get_world_size())
