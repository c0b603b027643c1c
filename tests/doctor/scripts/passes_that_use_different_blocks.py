# equal if: if each pass weighs its samples as is meant (head only)
class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.blocks[self.passes % 2](x)

model = DDP(Blocks(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(6):
    optimizer.zero_grad()
    for k in range(2):
        with model.no_sync() if k == 0 else torch.enable_grad():
            x = torch.randn(6, 6)
            (cross_entropy(model(x), x.argmax(1) % 4) / 2).backward()
    optimizer.step()
