"""Answers to try this chapter's checks on."""


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


# %% check_outer wrong: away from the average
def wrong_sign(common, local, velocity, lr, momentum):
    difference = (local - common) / dist.get_world_size()
    dist.all_reduce(difference)
    velocity = momentum * velocity + difference
    return common - lr * (difference + momentum * velocity), velocity


# %% check_outer wrong: the sum instead of the average
def not_divided(common, local, velocity, lr, momentum):
    difference = common - local
    dist.all_reduce(difference)
    velocity = momentum * velocity + difference
    return common - lr * (difference + momentum * velocity), velocity


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


# %% check_outer wrong: lr and momentum are written into the code
def own_numbers(common, local, velocity, lr, momentum):
    difference = (common - local) / dist.get_world_size()
    dist.all_reduce(difference)
    velocity = 0.9 * velocity + difference
    return common - 0.5 * (difference + 0.9 * velocity), velocity


# %% check_outer wrong: the common weights are changed in place
def in_place(common, local, velocity, lr, momentum):
    difference = (common - local) / dist.get_world_size()
    dist.all_reduce(difference)
    velocity = momentum * velocity + difference
    common -= lr * (difference + momentum * velocity)
    return common, velocity


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


# %% check_save wrong: the sum
def summed(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches, every=16)
    for weight in model.state_dict().values():
        dist.all_reduce(weight)
    return model.state_dict()


# %% check_save wrong: the last steps are left out
def until_the_last_synchronization(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches[:96], every=16)
    optimizer.synchronize()
    return model.state_dict()


# %% check_save wrong: the state is saved before it is synchronized
import copy


def saved_too_early(model, optimizer, batches):
    train_with_optimizer(model, optimizer, batches, every=16)
    state = copy.deepcopy(model.state_dict())
    optimizer.synchronize()
    return state
