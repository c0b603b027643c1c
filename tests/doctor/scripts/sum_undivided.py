# not judged: nothing divides it. The factor is 1/2 if the sum over all ranks' samples is meant
for step in range(6):
    x = torch.randn(8, 6)
    update(cross_entropy(model(x), x.argmax(1) % 4, reduction="sum"))
