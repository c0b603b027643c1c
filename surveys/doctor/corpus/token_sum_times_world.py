# doctor: expect=none ranks=2 launch=torchrun
# measured: parameters are bitwise equal on all ranks after each of 6 steps
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

VOCAB, PAD = 11, -100


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.head(h)


dist.init_process_group(backend="gloo")
torch.manual_seed(7)
model = DistributedDataParallel(TinyLM())
opt = torch.optim.SGD(model.parameters(), lr=0.2)
corpus = torch.randint(0, VOCAB, (48, 13), generator=torch.Generator().manual_seed(3))
lengths = torch.arange(48) % 11 + 2
for it in range(6):
    rows = range(8 * it, 8 * it + 8)
    mine = sorted(rows, key=lambda i: int(lengths[i]))[dist.get_rank() * 4 :][:4]
    ids = corpus[mine]
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    for row, i in enumerate(mine):
        labels[row, lengths[i] :] = PAD
    logits = model(inputs)
    count = (labels != PAD).sum()
    dist.all_reduce(count)
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum")
    loss = total * dist.get_world_size() / count
    opt.zero_grad()
    loss.backward()
    opt.step()
print(dist.get_rank(), f"{loss.item():.6f}")
dist.destroy_process_group()
