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
def first_row_is_the_rank(outputs, targets):
    first = dist.get_rank()  # as if rank 0 always had one sample
    padded = F.pad(outputs, (0, 0, first, 6 - first - len(outputs)))
    everything = differentiable.all_reduce(padded)
    return row_losses(targets, everything, first).sum() / 6


# %% check_own_rows wrong: divided by the own count
def own_count(outputs, targets):
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(outputs))
    first, total = sum(counts[: dist.get_rank()]), sum(counts)
    padded = F.pad(outputs, (0, 0, first, total - first - len(outputs)))
    everything = differentiable.all_reduce(padded)
    return row_losses(targets, everything, first).mean()


# %% check_own_rows wrong: a plain all-reduce
def plain(outputs, targets):
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(outputs))
    first, total = sum(counts[: dist.get_rank()]), sum(counts)
    padded = F.pad(outputs, (0, 0, first, total - first - len(outputs)))
    everything = padded.detach().clone()
    dist.all_reduce(everything)
    everything[first : first + len(outputs)] = outputs
    return row_losses(targets, everything, first).sum() / total


# %% check_own_rows wrong: own rows and own columns
def own_samples_only(outputs, targets):
    return row_losses(targets, outputs, 0).sum() / 6
