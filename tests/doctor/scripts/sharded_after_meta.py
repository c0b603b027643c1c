# not judged: nothing divides it (head only)
from torch.distributed.fsdp import fully_shard

with torch.device("meta"):
    model = fully_shard(nn.Linear(8, 4))
model.to_empty(device="cpu")
model.reset_parameters()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(5):
    x = torch.randn(6, 8, generator=generator)
    update(cross_entropy(model(x), x.argmax(1) % 4, reduction="sum"))
