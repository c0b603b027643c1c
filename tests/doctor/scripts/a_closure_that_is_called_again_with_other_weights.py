# equal
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
for step in range(5):
    x = torch.randn(8, 6)
    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(4).mean()
        loss.backward()
        return loss
    optimizer.step(closure)
