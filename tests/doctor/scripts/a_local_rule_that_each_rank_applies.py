# different: 0.weight is not rank 0's
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3, requires_grad=False)

    def forward(self, x):
        out = torch.tanh(x @ self.weight)
        with torch.no_grad():
            change = x.T @ out / len(x)
            self.weight.add_(change, alpha=0.05)
        return out

torch.manual_seed(0)
model = DDP(nn.Sequential(Layer(), nn.Linear(6, 4)))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    x = torch.randn(8, 6)
    update(cross_entropy(model(x), x.argmax(1) % 4))
