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
# part + (whole - part.detach()) → differentiable.all_reduce(part)


# %% check_barlow_twins wrong: the losses of the parts are added up
# dist.get_world_size() * loss_of(part + (whole - part.detach())) →
# differentiable.all_reduce(loss_of(part))


# %% check_barlow_twins wrong: every rank computes the whole batch
# part_of_correlation(model, rows) → part_of_correlation(model, slice(None))


# %% check_barlow_twins blind result. (another|NaN): only gradients count; none is NaN
# %% check_barlow_twins blind calls: each rank calls it once
