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


# %% check_drift wrong: rank 0 is the reference
# stacked.amax(0) - stacked.amin(0) → (stacked - stacked[0]).abs()


# %% check_drift wrong: each rank has its own number
# stacked.amax(0) - stacked.amin(0) → (stacked.mean(0) - p).abs()


# %% check_drift wrong: rounded to three digits
# torch.stack(drifts).max().item() → round(torch.stack(drifts).max().item(), 3)


# %% check_drift wrong: relative to the larger value
# stacked.amin(0)) → stacked.amin(0)).div(stacked.abs().amax(0).clamp(min=1))


# %% check_drift wrong: Python's max, which loses a NaN
# torch.stack(drifts).max().item() → max(0.0, *(drift.item() for drift in drifts))


# %% check_drift wrong: the last row is left out
# torch.stack(copies) → torch.stack(copies)[:, :-1]


# %% check_drift wrong: an infinite difference is called NaN
# torch.stack(drifts).max().item() → torch.stack(drifts).max().nan_to_num(
#         torch.nan, torch.nan
#     ).item()


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


# %% check_shares wrong: the number of samples is written into the code
# int(sum(counts)) → len(inputs)


# %% check_shares wrong: it takes the targets away
# return F.mse_loss(outputs, targets) → targets, _ = targets.clone(), targets.zero_()
#     return F.mse_loss(outputs, targets)


# %% check_shares wrong: the counts of the first step are kept
# dist.all_gather(counts, torch.tensor(len(targets))) →
# counts = weighed_mean.__dict__.setdefault("counts", counts)
#     if not any(counts):
#         dist.all_gather(counts, torch.tensor(len(targets)))


# %% check_shares blind result. (another|NaN): a constant has no gradient; none is NaN
