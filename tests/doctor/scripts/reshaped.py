# equal if: is one process's own (head only)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.positions, self.scale = nn.Embedding(6, 8), nn.Parameter(torch.tensor([1.0]))
    def forward(self, x, y):
        inputs = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
        logits = self.scale * inputs @ self.embedding.weight.T
        return cross_entropy(logits.flatten(0, 1), y.flatten())

tokens = torch.randint(0, 9, (512,))
model = DDP(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    start = (step * 2 + dist.get_rank()) * 24
    part = tokens[start : start + 25]
    with torch.no_grad():
        shorter = part[:12].view(4, 3)
        losses = [float(model.module(shorter[row : row + 2], shorter[:2])) for row in (0, 2)]
    update(model(part[:-1].view(4, 6), part[1:].view(4, 6)))
