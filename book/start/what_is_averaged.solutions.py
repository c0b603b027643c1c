"""Answers to try this chapter's checks on."""


# %% check_drift right: all replicas are gathered
def gathered(model):
    drifts = []
    for p in model.parameters():
        copies = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, p.detach().contiguous())
        stacked = torch.stack(copies)
        drifts.append((stacked.amax(0) - stacked.amin(0)).max())
    return torch.stack(drifts).max().item()


# %% check_drift right: one flat vector, in NumPy
import numpy as np


def in_numpy(model):
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    copies = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, values)
    return float(np.ptp(np.stack(copies), axis=0).max())


# %% check_drift wrong: only the last parameter counts
def last_parameter(model):
    for p in model.parameters():
        high, low = p.detach().clone(), p.detach().clone()
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        largest = (high - low).max().item()
    return largest


# %% check_drift wrong: rank 0 is the reference
def against_rank_0(model):
    largest = torch.zeros(())
    for p in model.parameters():
        first = p.detach().clone()
        dist.broadcast(first, src=0)
        largest = torch.maximum(largest, (p.detach() - first).abs().max())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


# %% check_drift wrong: each rank has its own number
def own_number(model):
    largest = 0.0
    for p in model.parameters():
        mean = p.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        largest = max(largest, (p.detach() - mean).abs().max().item())
    return largest


# %% check_drift wrong: the number of the example
def written_in(model):
    return 0.75


# %% check_drift wrong: rounded to three digits
def rounded(model):
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = torch.cat([values, -values])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return round(sum(both.chunk(2)).max().item(), 3)


# %% check_drift wrong: relative to the larger value
def relative(model):
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    high, low = values.clone(), values.clone()
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    return ((high - low) / high.abs().clamp(min=1)).max().item()


# %% check_shares right: the mean, times the rank's share
def weighed_mean(outputs, targets):
    counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(len(targets)))
    share = len(targets) / int(sum(counts))
    return F.mse_loss(outputs, targets) * share * dist.get_world_size()


# %% check_shares right: the average of the counts
def by_the_mean_count(outputs, targets):
    count = torch.tensor(float(outputs.numel()))
    dist.all_reduce(count)
    count /= dist.get_world_size()
    return F.mse_loss(outputs, targets, reduction="sum") / count


# %% check_shares wrong: without the world size
def without_the_factor(outputs, targets):
    count = torch.tensor(len(targets))
    dist.all_reduce(count)
    return (outputs - targets).square().sum() / count


# %% check_shares wrong: times W, and divided by the own count
def factor_on_the_mean(outputs, targets):
    return F.mse_loss(outputs, targets) * dist.get_world_size()


# %% check_shares wrong: made for four ranks and eight samples
def written_in(outputs, targets):
    return (outputs - targets).square().sum() * 4 / 8


# %% check_drift wrong: Python's max, which loses a NaN
def loses_nan(model):
    drift = 0.0
    for p in model.parameters():
        copies = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, p.detach())
        stacked = torch.stack(copies)
        drift = max(drift, (stacked.amax(0) - stacked.amin(0)).max().item())
    return drift


# %% check_drift blind result. (another (dtype|sh)|detached): a number has none
# %% check_drift blind calls: each rank calls it once
