# not judged
import random

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, rows):
        return self.linear(torch.tensor(rows))

torch.manual_seed(0)
model = DDP(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
random.seed(dist.get_rank())
for step in range(5):
    rows = [[random.random() for _ in range(6)] for _ in range(5)]
    update(model(rows).pow(4).mean())
