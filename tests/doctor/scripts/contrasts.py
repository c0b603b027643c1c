# equal
from torch.distributed.nn.functional import all_gather

for step in range(5):
    first, second = model(torch.randn(6, 2, 6)).unbind(1)
    labels = torch.arange(len(first)) + len(first) * dist.get_rank()
    update(cross_entropy(first @ torch.cat(all_gather(second)).T, labels))
