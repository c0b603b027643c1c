# equal
for step in range(5):
    x, noise = torch.randn(8, 6), torch.randn(2, 8, 6)
    update((model(x + noise[0]) * model(x + noise[1])).pow(2).mean())
