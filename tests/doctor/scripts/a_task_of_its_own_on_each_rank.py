# not judged: cannot be joined
class OfTask(nn.Linear):
    def forward(self, x, task):
        return super().forward(x)[:, task]
torch.manual_seed(0)
model = DDP(OfTask(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6), task=dist.get_rank()).pow(4).mean())
