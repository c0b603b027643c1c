# not judged: the same samples give
import random
random.seed(dist.get_rank())
class Drops(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()
torch.manual_seed(0)
model = DDP(Drops(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6)).pow(4).mean())
