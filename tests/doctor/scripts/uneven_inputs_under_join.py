# equal: computes the same gradient
rank = dist.get_rank()
for epoch in range(3):
    with model.join():
        for step in range(6 + 2 * rank):
            update(model(torch.randn(8, 6)).pow(4).mean())
