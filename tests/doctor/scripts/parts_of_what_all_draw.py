# equal
class OfBatches(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["rows"])

torch.manual_seed(0)
model = DDP(OfBatches(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    mine = torch.randn(16, 6).chunk(dist.get_world_size())[dist.get_rank()]
    update(model({"rows": mine}).pow(4).mean())
