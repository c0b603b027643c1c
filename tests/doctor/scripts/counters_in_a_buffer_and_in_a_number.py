# equal
class Sketched(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.last = nn.Linear(6, 4), 0, 0
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        self.steps += 1
        self.calls += 1
        self.last = x
        if not len(self.seen):
            self.seen.resize_(4).zero_()  # as fake quantization does
        return self.linear(x) * (int(self.steps) + 0.1 * self.calls)

torch.manual_seed(0)
model = DDP(Sketched())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 6, sampler=DistributedSampler(data)):
    update(model(x).pow(4).mean())
