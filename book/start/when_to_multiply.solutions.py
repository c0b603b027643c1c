"""Answers to try this chapter's checks on."""


# %% check_own_rows right: the counts come from all_gather_object
def own_rows_counted(outputs, targets):
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(outputs))
    first, total = sum(counts[: dist.get_rank()]), sum(counts)
    rows = torch.zeros(total, outputs.shape[1])
    rows = rows.index_copy(0, torch.arange(first, first + len(outputs)), outputs)
    everything = differentiable.all_reduce(rows)
    return row_losses(targets, everything, first).sum() / total


# %% check_own_rows right: padded to the longest, gathered, and cut
def own_rows_padded(outputs, targets):
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(outputs))
    padded = F.pad(outputs, (0, 0, 0, max(counts) - len(outputs)))
    gathered = differentiable.all_gather(padded).split(max(counts))
    everything = torch.cat([g[:n] for g, n in zip(gathered, counts, strict=True)])
    first = sum(counts[: dist.get_rank()])
    return row_losses(targets, everything, first).sum() / sum(counts)


# %% check_own_rows wrong: the first row is the rank's number
# sum(counts[: dist.get_rank()]), sum → dist.get_rank(), sum


# %% check_own_rows wrong: divided by the own count
# .sum() / total → .mean()


# %% check_own_rows wrong: a plain all-reduce
# differentiable.all_reduce(rows) → rows.detach().clone()
#     dist.all_reduce(everything)
#     everything[first : first + len(outputs)] = outputs


# %% check_own_rows wrong: own rows and own columns
# row_losses(targets, everything, first) → row_losses(targets, outputs, 0)


# %% check_own_rows wrong: a rank without a row takes no part
# counts = → if len(outputs) == 0:
#         return outputs.sum()
#     counts =


# %% check_own_rows wrong: the number of samples of the first step is kept
# .sum() / total → .sum() / own_rows_counted.__dict__.setdefault("total", total)


# %% check_own_rows blind result. (another|NaN): a constant has no gradient; none is NaN
