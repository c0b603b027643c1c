"""Answers to try this chapter's checks on."""


# %% check_truncated right: the loop of the stub, with another count
def counts_finished(ddp, window):
    parts = [finished(part) for part in window]
    tokens = sum(part.mask.sum() for part in parts)
    dist.all_reduce(tokens)
    for k, part in enumerate(parts):
        with nullcontext() if k == len(parts) - 1 else ddp.no_sync():
            total = sampled.dapo(ddp, part)
            (total * dist.get_world_size() / tokens).backward()


# %% check_truncated right: sums first, divided at the end
def divides_at_the_end(ddp, window):
    parts = [finished(part) for part in window]
    for k, part in enumerate(parts):
        with nullcontext() if k == len(parts) - 1 else ddp.no_sync():
            sampled.dapo(ddp, part).backward()
    tokens = torch.stack([part.mask.sum() for part in parts]).sum()
    dist.all_reduce(tokens)
    for parameter in ddp.parameters():
        parameter.grad *= dist.get_world_size() / tokens


# %% check_truncated wrong: truncated completions stay in the sum, too
# [finished(part) for part in window] → window


# %% check_truncated wrong: the mean of the micro-batches' means
# total * dist.get_world_size() / tokens →
# total / part.mask.sum().clamp(min=1) / len(parts)


# %% check_truncated wrong: a rank without tokens runs no backward
# total = sampled.dapo(ddp, part) → if not any(each.mask.any() for each in parts):
#                 continue
#             total = sampled.dapo(ddp, part)


# %% check_advantages right: one row per group, by one-hot vectors
def one_hot(rewards, groups):
    member = torch.nn.functional.one_hot(groups, 12).to(rewards.dtype)
    total, count = rewards @ member, member.sum(0)
    dist.all_reduce(total)
    dist.all_reduce(count)
    return rewards - member @ (total / count.clamp(min=1))


# %% check_advantages right: everything is gathered, as Python objects
def gathered(rewards, groups):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (rewards, groups))
    all_rewards, all_groups = (torch.cat(each) for each in zip(*parts, strict=True))
    means = [all_rewards[all_groups == group].mean() for group in groups]
    return rewards - torch.stack(means)


# %% check_advantages right: the sums are in float32
# dist.all_reduce(total) → total = total.float()
#     dist.all_reduce(total)
#     total = total.to(rewards.dtype)


# %% check_advantages wrong: every group has four
# count.clamp(min=1) → 4


# %% check_advantages wrong: the mean of the ranks' means
# rewards @ member, member.sum(0) →
# rewards @ member / member.sum(0).clamp(min=1), torch.ones(12)


# %% check_advantages wrong: the mean of all rewards
# member @ (total / count.clamp(min=1)) → total.sum() / count.sum()


# %% check_advantages wrong: the completions of a group have to be neighbors
def sorted_groups(rewards, groups):
    ids, counts = torch.unique_consecutive(groups, return_counts=True)
    both = torch.zeros(2, 12, dtype=rewards.dtype)
    for i, part in zip(ids, rewards.split(counts.tolist()), strict=True):
        both[0, i] = part.sum()
        both[1, i] = len(part)
    dist.all_reduce(both)
    return rewards - (both[0] / both[1].clamp(min=1))[groups]


# %% check_advantages wrong: a gather, as if all ranks had as many completions
def plain_gather(rewards, groups):
    rewards_of, groups_of = (
        [torch.empty_like(own) for _ in range(dist.get_world_size())]
        for own in (rewards, groups)
    )
    dist.all_gather(rewards_of, rewards)
    dist.all_gather(groups_of, groups)
    everyone, group_of = torch.cat(rewards_of), torch.cat(groups_of)
    means = [everyone[group_of == group].mean() for group in groups]
    return rewards - torch.stack(means)


# %% check_advantages blind result. NaN: no reward is NaN
# %% check_truncated blind calls: each rank calls it once
