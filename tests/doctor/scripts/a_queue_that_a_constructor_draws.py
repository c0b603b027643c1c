# equal (head only)
class Contrast(nn.Module):
    """Keys of a momentum encoder that moves in each forward, and a queue of other keys."""

    def __init__(self):
        super().__init__()
        self.encoder, self.keys = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        nn.init.zeros_(self.keys.bias)  # which the doctor fills
        self.register_buffer("queue", normalize(torch.randn(4, 12), dim=0))

    def forward(self, x):
        queries = normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            for key, weight in zip(self.keys.parameters(), self.encoder.parameters()):
                key.data = key.data * 0.5 + weight.data * 0.5
            keys = normalize(self.keys(x), dim=1)
        own = (queries * keys).sum(1, keepdim=True)
        return torch.cat([own, queries @ self.queue.clone()], 1)

torch.manual_seed(dist.get_rank())
model = DDP(Contrast())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images = torch.randn(80, 6, generator=torch.Generator().manual_seed(4))
for step in range(5):
    mine = images[dist.get_rank() :: dist.get_world_size()][8 * step : 8 * step + 8]
    x = mine + 0.1 * torch.randn_like(mine)
    update(cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)))
