# not judged: ValueError: no at train.py:
class Failing(torch.optim.SGD):
    def step(self):
        raise ValueError('no')

optimizer = Failing(model.parameters())
update(model(torch.randn(6, 6)).mean())
