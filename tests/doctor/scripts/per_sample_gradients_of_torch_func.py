# equal if: No call of a model
net, parameters = model.module, dict(model.module.named_parameters())
def loss(values, x):
    return torch.func.functional_call(net, values, (x[None],)).pow(4).mean()
for step in range(5):
    x = torch.randn(8, 6)
    values = {name: p.detach() for name, p in parameters.items()}
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x)
    for name, p in parameters.items():
        p.grad = each[name].mean(0)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
