# equal
for step in range(5):
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    update(model(torch.randn(8, 6)).pow(4).mean() + penalty)
