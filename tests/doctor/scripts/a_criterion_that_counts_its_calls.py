# equal if: the loss is a mean
class Sketch(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, out):
        generator = torch.Generator().manual_seed(int(self.steps))
        directions = torch.randn(4, 2, generator=generator)
        directions /= directions.norm(dim=0)
        self.steps = self.steps + 1
        return (out @ directions).pow(4).mean()

sketch = Sketch()
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data)):
    update(sketch(model(x)))
