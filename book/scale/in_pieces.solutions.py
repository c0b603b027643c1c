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


# %% check_norm wrong: a sum of norms
def sum_of_norms(pieces, shards):
    norm = torch.cat([piece.flatten() for piece in pieces]).norm()
    dist.all_reduce(norm, group=shards)
    return norm


# %% check_norm wrong: over all ranks
def over_all_ranks(pieces, shards):
    squares = sum(piece.square().sum() for piece in pieces)
    dist.all_reduce(squares)
    return squares.sqrt()


# %% check_norm wrong: the average over the shards
def average(pieces, shards):
    squares = sum(piece.square().sum() for piece in pieces)
    dist.all_reduce(squares, group=shards)
    return (squares / dist.get_world_size(shards)).sqrt()


# %% check_adapter right: the adapter is a unit of its own
def a_unit_of_its_own():
    adapted = Adapted().add_adapter()
    fully_shard(adapted.adapter)
    return fully_shard(adapted)


# %% check_adapter right: everyone draws the same, before sharding
def same_seed_and_sharded():
    torch.manual_seed(0)
    adapted = Adapted()
    adapted.adapter = nn.Linear(16, 8, bias=False)
    fully_shard(adapted)
    return adapted


# %% check_adapter wrong: the same seed, but not sharded
def same_seed():
    adapted = fully_shard(Adapted())
    torch.manual_seed(0)
    return adapted.add_adapter()


# %% check_adapter wrong: rank 0's weights are sent, but gradients stay local
def broadcast_after_sharding():
    adapted = fully_shard(Adapted()).add_adapter()
    dist.broadcast(adapted.adapter.weight.data, src=0)
    return adapted


# %% check_adapter wrong: the gradients are summed
def summed_by_a_hook():
    adapted = fully_shard(Adapted()).add_adapter()
    dist.broadcast(adapted.adapter.weight.data, src=0)

    def total(gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

    adapted.adapter.weight.register_hook(total)
    return adapted


# %% check_adapter wrong: added twice, before and after sharding
def added_again():
    return fully_shard(Adapted().add_adapter()).add_adapter()


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
def plain_momentum(common, local, velocity, lr, momentum):
    difference = (common - local) / dist.get_world_size()
    dist.all_reduce(difference)
    velocity = momentum * velocity + difference
    return common - lr * velocity, velocity


# %% check_outer wrong: rank 0 decides
def rank_0_decides(common, local, velocity, lr, momentum):
    difference = common - local
    dist.broadcast(difference, src=0)
    velocity = momentum * velocity + difference
    return common - lr * (difference + momentum * velocity), velocity


# %% check_outer wrong: the velocity is lost
def no_velocity(common, local, velocity, lr, momentum):
    difference = (common - local) / dist.get_world_size()
    dist.all_reduce(difference)
    return common - lr * (1 + momentum) * difference, velocity


# %% check_save right: rank 0 alone gets the average
def reduced_to_rank_0(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches, every=16)
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    for weight in weights.values():
        dist.reduce(weight, dst=0)
        weight /= dist.get_world_size()
    return weights


# %% check_save right: an all-reduce of the weights
def averaged_at_the_end(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches, every=16)
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()
    return model.state_dict()


# %% check_save wrong: the weights of rank 0 for all
def rank_0_for_all(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches, every=16)
    for weight in model.state_dict().values():
        dist.broadcast(weight, src=0)
    return model.state_dict()


# %% check_save wrong: the last steps are left out
def until_the_last_synchronization(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches[:96], every=16)
    optimizer.synchronize()
    return model.state_dict()


# %% check_save wrong: the sum
def summed(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches, every=16)
    for weight in model.state_dict().values():
        dist.all_reduce(weight)
    return model.state_dict()


# %% check_save wrong: the state is saved before it is synchronized
import copy


def saved_too_early(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches, every=16)
    state = copy.deepcopy(model.state_dict())
    optimizer.synchronize()
    return state


# %% check_norm blind result. (NaN|another sh|detached): float() reads it
# %% check_norm blind calls: each rank has one gradient

# %% check_outer blind result. (NaN|detached): no weight is NaN, none has a graph
