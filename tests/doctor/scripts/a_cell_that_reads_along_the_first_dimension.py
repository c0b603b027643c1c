# not judged: second dimension
class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 4)
    def forward(self, x):
        h = torch.zeros(x.shape[1], 4)
        for one in x.unbind(0):
            h = self.cell(one, h)
        return h
torch.manual_seed(0)
model = DDP(Reads())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(3, 8, 6)).pow(4).mean())
