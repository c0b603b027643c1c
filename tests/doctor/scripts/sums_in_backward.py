# scaled: W = 2 times
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(context, p):
        return p.view_as(p)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

torch.manual_seed(0)
weight = nn.Parameter(torch.randn(4, 6))
optimizer = torch.optim.SGD([weight], lr=0.1)
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 8, sampler=DistributedSampler(data)):
    out = nn.functional.linear(x, Sum.apply(weight))
    update(nn.functional.mse_loss(out, x[:, :4]))
