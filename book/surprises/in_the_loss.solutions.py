"""Answers to try this chapter's checks on."""


# %% check_barlow_twins right: the other ranks' part is a constant
def constant_of_the_others(model, rows):
    part = part_of_correlation(model, rows)
    whole = part.detach().clone()
    dist.all_reduce(whole)
    return dist.get_world_size() * loss_of(part + (whole - part.detach()))


# %% check_barlow_twins right: the features are summed with zeros elsewhere
def all_features(model, rows):
    a, b = model(torch.cat([inputs[rows], inputs[rows] + 0.1])).chunk(2)
    padded = torch.zeros(2, len(inputs), a.shape[1])
    padded = padded.index_add(1, torch.arange(len(inputs))[rows], torch.stack([a, b]))
    a, b = differentiable.all_reduce(padded)
    return loss_of(a.T @ b / len(inputs))


# %% check_barlow_twins wrong: repaired twice
def both_repairs(model, rows):
    whole = differentiable.all_reduce(part_of_correlation(model, rows))
    return dist.get_world_size() * loss_of(whole)


# %% check_barlow_twins wrong: each rank's own correlation
def own_correlation(model, rows):
    a, b = model(torch.cat([inputs[rows], inputs[rows] + 0.1])).chunk(2)
    return loss_of(a.T @ b / len(a))


# %% check_barlow_twins wrong: the mean of the ranks' correlations
def mean_of_means(model, rows):
    a, b = model(torch.cat([inputs[rows], inputs[rows] + 0.1])).chunk(2)
    whole = differentiable.all_reduce(a.T @ b / len(a))
    return loss_of(whole / dist.get_world_size())


# %% check_barlow_twins wrong: the losses of the parts are added up
def sum_of_losses(model, rows):
    return differentiable.all_reduce(loss_of(part_of_correlation(model, rows)))


# %% check_barlow_twins wrong: the average instead of the sum
def averaged(model, rows):
    part = differentiable.all_reduce(part_of_correlation(model, rows))
    return loss_of(part / dist.get_world_size())
