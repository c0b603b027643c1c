# equal
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)
        self.seed = nn.Parameter(torch.tensor([0, 7], dtype=torch.int32), requires_grad=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return self.net(x)

torch.manual_seed(0)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(6):
    update(model(torch.randn(8, 6)).pow(4).mean())
