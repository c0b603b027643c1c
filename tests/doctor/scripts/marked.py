# equal (head only)
import ddp_doctor

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
    def forward(self, x, rows):
        return self.linear(x.view(rows, 8))

rank = dist.get_rank()
model = DDP(Rows())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
for step in range(5):
    x = torch.randn([4, 6][rank], 8, generator=generator)
    x = ddp_doctor.batch(x)
    rows = len(x)
    count = torch.tensor(float(rows))
    dist.all_reduce(count)
    loss = cross_entropy(model(x, rows), x.argmax(1) % 4, reduction="sum")
    update(loss * dist.get_world_size() / count)
