"""Answers to try this chapter's checks on."""


# %% check_norm right: the norms of the pieces, squared
def squares_of_norms(pieces, shards):
    norms = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces])
    total = norms.pow(2).sum()
    dist.all_reduce(total, group=shards)
    return total.sqrt()


# %% check_norm right: the ranks' norms are gathered
def gathered(pieces, shards):
    own = torch.cat([piece.flatten() for piece in pieces]).norm()
    norms = [torch.zeros(()) for _ in range(dist.get_world_size(shards))]
    dist.all_gather(norms, own, group=shards)
    return torch.stack(norms).norm()


# %% check_norm wrong: over all ranks
# total, group=shards → total


# %% check_adapter right: the adapter is a unit of its own
def a_unit_of_its_own():
    adapted = Adapted().add_adapter()
    fully_shard(adapted.adapter)
    return fully_shard(adapted)


# %% check_adapter right: everyone draws the same, before sharding
def same_seed_and_sharded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted = Adapted()
        adapted.adapter = nn.Linear(16, 8, bias=False)
    fully_shard(adapted)
    return adapted


# %% check_adapter wrong: one seed, and then the same random numbers on all ranks
# adapted = → torch.manual_seed(0)
#     adapted =


# %% check_adapter wrong: the same seed, but not sharded
def same_seed():
    adapted = fully_shard(Adapted())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return adapted.add_adapter()


# %% check_adapter wrong: rank 0's weights are sent, but gradients stay local
# fully_shard(adapted.adapter) → adapted = fully_shard(Adapted()).add_adapter()
# return fully_shard(adapted) → dist.broadcast(adapted.adapter.weight.data, src=0)
#     return adapted


# %% check_adapter wrong: only the adapter is sharded
# return fully_shard(adapted) → return adapted


# %% check_adapter wrong: added twice, before and after sharding
# return fully_shard(adapted) → return fully_shard(adapted).add_adapter()


# %% check_adapter wrong: averaged by a hook for two ranks
def averaged_over_two():
    adapted = fully_shard(Adapted()).add_adapter()
    dist.broadcast(adapted.adapter.weight.data, src=0)

    def half_of_the_sum(gradient):
        gradient = gradient / 2
        dist.all_reduce(gradient)
        return gradient

    adapted.adapter.weight.register_hook(half_of_the_sum)
    return adapted


# %% check_adapter wrong: the base is trained, too
# add_adapter() → add_adapter().requires_grad_(True)


# %% check_outer right: the local weights are averaged
def average_of_weights(common, local, velocity, lr, momentum):
    average = local.clone()
    dist.all_reduce(average)
    difference = common - average / dist.get_world_size()
    velocity = momentum * velocity + difference
    return common - lr * difference - lr * momentum * velocity, velocity


# %% check_outer right: all differences are gathered
def gathered(common, local, velocity, lr, momentum):
    differences = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(differences, common - local)
    gradient = torch.stack(differences).mean(dim=0)
    velocity = velocity.mul(momentum).add(gradient)
    return common.sub(gradient.add(velocity, alpha=momentum), alpha=lr), velocity


# %% check_outer wrong: momentum without Nesterov
# lr * difference - lr * momentum * velocity → lr * velocity


# %% check_save right: rank 0 alone gets the average
def reduced_to_rank_0(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches, every=16)
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    for weight in weights.values():
        dist.reduce(weight, dst=0)
        weight /= dist.get_world_size()
    return weights


# %% check_save right: rank 0 alone returns something
# return weights → return weights if dist.get_rank() == 0 else None


# %% check_save wrong: the last steps are left out
# batches, every → batches[:96], every


# %% check_save wrong: the state before the average
# return weights → return model.state_dict()


# %% check_save wrong: numbers instead of names
# return weights → return dict(enumerate(weights.values()))

# %% check_save wrong: another shape
# return weights → return {name: w[None] for name, w in weights.items()}


# %% check_norm blind result. (another sh|detached): float() reads it


# %% check_adapter blind ⏎ → add_adapter.. ⏎ .*return: sharded with the rest
# %% check_adapter blind calls: it is called once
# %% check_save blind 16 → 1[57]: the optimizer has its own H
# %% check_save blind arguments: the run has ended
# %% check_save blind calls: it is called once
