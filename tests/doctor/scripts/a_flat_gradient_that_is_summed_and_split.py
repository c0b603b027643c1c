# scaled: W = 2 times
net = model.module
for step in range(5):
    optimizer.zero_grad()
    net(torch.randn(8, 6)).pow(4).mean().backward()
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    for p, part in zip(net.parameters(), flat.split([24, 4])):
        p.grad = part.view_as(p).clone()
    optimizer.step()
