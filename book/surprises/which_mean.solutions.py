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
def keeps_them(ddp, window):
    right_step(ddp, window, dapo)


# %% check_truncated wrong: the mean of the micro-batches' means
def mean_of_means(ddp, window):
    parts = [finished(part) for part in window]
    for k, part in enumerate(parts):
        with nullcontext() if k == len(parts) - 1 else ddp.no_sync():
            total = sampled.dapo(ddp, part)
            (total / part.mask.sum().clamp(min=1) / len(parts)).backward()


# %% check_truncated wrong: a rank without tokens runs no backward
def skips_backward(ddp, window):
    parts = [finished(part) for part in window]
    tokens = sum(part.mask.sum() for part in parts)
    own = tokens.item()
    dist.all_reduce(tokens)
    for k, part in enumerate(parts):
        with nullcontext() if k == len(parts) - 1 else ddp.no_sync():
            if own:
                total = sampled.dapo(ddp, part)
                (total * dist.get_world_size() / tokens).backward()


# %% check_advantages right: everything is gathered, as Python objects
def gathered(rewards, groups):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (rewards, groups))
    all_rewards, all_groups = (torch.cat(each) for each in zip(*parts, strict=True))
    means = [all_rewards[all_groups == group].mean() for group in groups]
    return rewards - torch.stack(means)


# %% check_advantages right: one row per group, by one-hot vectors
def one_hot(rewards, groups):
    member = torch.nn.functional.one_hot(groups, 12).to(rewards.dtype)
    total, count = rewards @ member, member.sum(0)
    dist.all_reduce(total)
    dist.all_reduce(count)
    return rewards - member @ (total / count.clamp(min=1))


# %% check_advantages wrong: every group has four
def always_four(rewards, groups):
    sums = torch.zeros(12, dtype=rewards.dtype)
    sums.index_add_(0, groups, rewards)
    dist.all_reduce(sums)
    return rewards - (sums / 4)[groups]


# %% check_advantages wrong: the mean of the ranks' means
def mean_of_means(rewards, groups):
    both = torch.zeros(2, 12, dtype=rewards.dtype)
    both.index_add_(1, groups, torch.stack([rewards, torch.ones_like(rewards)]))
    means = both[0] / both[1].clamp(min=1)
    dist.all_reduce(means)
    return rewards - (means / dist.get_world_size())[groups]


# %% check_advantages wrong: rank 0 decides
def rank_0_decides(rewards, groups):
    both = torch.zeros(2, 12, dtype=rewards.dtype)
    both.index_add_(1, groups, torch.stack([rewards, torch.ones_like(rewards)]))
    dist.broadcast(both, src=0)
    return rewards - (both[0] / both[1].clamp(min=1))[groups]


# %% check_advantages wrong: the mean of all rewards
def mean_of_all(rewards, groups):
    total = torch.stack([rewards.sum(), rewards.new_tensor(len(rewards))])
    dist.all_reduce(total)
    return rewards - total[0] / total[1]


# %% check_advantages right: the sums are in float32
def in_float32(rewards, groups):
    both = torch.zeros(2, 12)
    both.index_add_(1, groups, torch.stack([rewards, torch.ones_like(rewards)]).float())
    dist.all_reduce(both)
    return rewards - (both[0] / both[1].clamp(min=1)).to(rewards.dtype)[groups]
