# equal
class Shy(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls in (1, 4):
            raise ArithmeticError("not finite")
        return super().step(closure)

optimizer = Shy(model.parameters(), lr=0.1)
for step in range(9):
    optimizer.zero_grad()
    model(torch.randn(8, 6)).pow(4).mean().backward()
    try:
        optimizer.step()
    except ArithmeticError:
        optimizer.zero_grad()
