"""A word LSTM with truncated backpropagation: hooks clamp each rank's gradient before it is averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, DIM, BATCH, BPTT, CLIP = 30, 20, 6, 7, 0.002


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.LSTM(DIM, DIM, num_layers=2)
        self.decoder = nn.Linear(DIM, VOCAB)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, VOCAB), hidden

    def init_hidden(self, batch):
        return torch.zeros(2, batch, DIM), torch.zeros(2, batch, DIM)


def batchify(data, batch):
    length = len(data) // batch
    return data[: length * batch].view(batch, length).t().contiguous()


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].reshape(-1)


def repackage_hidden(hidden):
    return tuple(h.detach() for h in hidden)


def corpus(n=2000):
    g = torch.Generator().manual_seed(19)
    steps = torch.randint(1, 6, (n,), generator=g)
    return steps.cumsum(0) % VOCAB


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1111)
    model = RNNModel()
    for p in model.parameters():
        p.register_hook(lambda grad: torch.clamp(grad, -CLIP, CLIP))
    model = DDP(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    columns = batchify(corpus(), BATCH * world_size)
    train_data = columns[:, rank * BATCH : (rank + 1) * BATCH].contiguous()
    hidden = model.module.init_hidden(BATCH)
    for i in range(0, 12 * BPTT, BPTT):
        data, targets = get_batch(train_data, i)
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
