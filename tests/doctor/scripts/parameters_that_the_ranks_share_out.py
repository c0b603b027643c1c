# not judged: optimizers have other parameters each
every = [*model.parameters()]
mine = every[dist.get_rank() :: 2]
optimizer = torch.optim.SGD(mine, lr=0.1)
for step in range(5):
    x = torch.randn(6, 6)
    model.zero_grad()
    cross_entropy(model(x), x.argmax(1) % 4).backward()
    nn.utils.clip_grad_norm_(mine, 0.01)
    optimizer.step()
    for rank, parameter in enumerate(every):
        dist.broadcast(parameter.data, rank)
