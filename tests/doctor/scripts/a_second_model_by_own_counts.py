# different
torch.manual_seed(0)
second = DDP(nn.Linear(6, 1))
its = torch.optim.SGD(second.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6)).pow(4).mean())
    x = torch.randn(8, 6)
    kept = x[:, 0] > 0
    its.zero_grad()
    ((second(x)[:, 0] - x[:, 1]) ** 2 * kept).sum().div(kept.sum()).backward()
    its.step()
