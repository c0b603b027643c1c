# equal
torch.manual_seed(0)
x, (target, source) = torch.randn(96, 6), torch.randint(96, (2, 300))
sums = torch.zeros(96, 6).index_add_(0, target, x[source])
for step in range(5):
    start = 8 * (2 * step + dist.get_rank())
    update(model(sums[start : start + 8]).pow(4).mean())
