# not judged: along the second dimension
class Read(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]
torch.manual_seed(0)
model = DDP(Read(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(3, 8, 6)).pow(4).mean())
