# not judged: takes no second one
for step in range(5):
    if step == 1:
        model = DDP(nn.Sequential(model.module, nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update(model(torch.randn(8, 6)).pow(4).mean())
