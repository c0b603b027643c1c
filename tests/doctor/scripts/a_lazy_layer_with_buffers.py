# equal
torch.manual_seed(0)
model = nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(4))
model(torch.zeros(2, 6))
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6)).pow(4).mean())
