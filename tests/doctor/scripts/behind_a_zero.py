# different
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * dist.get_world_size()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep, self.gate = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x + self.gate * Scaled.apply(self.deep(x))

torch.manual_seed(0)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(5):
    x = torch.randn(6, 6)
    update((model(x) - x.flip(1)).pow(2).mean())
