"""Answers to try this chapter's checks on."""


# %% check_row_parallel right: a part of the bias before the sum
def part_of_the_bias(x, weight, bias, mesh):
    return mesh.sum(F.linear(x, weight, bias / mesh.size("tensor")), "tensor")


# %% check_row_parallel right: the first rank alone adds the bias
def on_the_first_rank(x, weight, bias, mesh):
    own = bias if mesh.index("tensor") == 0 else None
    return mesh.sum(F.linear(x, weight, own), "tensor")


# %% check_row_parallel right: the surplus is taken away after the sum
def without_the_surplus(x, weight, bias, mesh):
    surplus = (mesh.size("tensor") - 1) * bias
    return mesh.sum(F.linear(x, weight, bias), "tensor") - surplus


# %% check_row_parallel wrong: every rank adds the whole bias
def on_every_rank(x, weight, bias, mesh):
    return mesh.sum(F.linear(x, weight) + bias, "tensor")


# %% check_row_parallel wrong: half of the bias, with the 2 written into the code
def half_of_the_bias(x, weight, bias, mesh):
    return mesh.sum(F.linear(x, weight, bias / 2), "tensor")


# %% check_row_parallel wrong: the bias gets no gradient
def detached(x, weight, bias, mesh):
    return mesh.sum(F.linear(x, weight), "tensor") + bias.detach()


# %% check_row_parallel wrong: right under DTensor's convention
def as_in_torchtitan(x, weight, bias, mesh):
    part = bias + (bias / mesh.size("tensor") - bias).detach()
    return mesh.sum(F.linear(x, weight, part), "tensor")


# %% check_row_parallel wrong: summed along data
def along_data(x, weight, bias, mesh):
    return mesh.sum(F.linear(x, weight), "data") + bias


# %% check_norm right: the router counts on one rank of the group
def router_on_one_rank(gradients, mesh):
    squares = {name: gradient.square().sum() for name, gradient in gradients.items()}
    total = squares["up"] + squares["down"]
    if mesh.index("expert") == 0:
        total = total + squares["router"]
    mesh.add_up(total, ["expert"])
    return total.sqrt().item()


# %% check_norm right: each rank adds its part of the router's square
def a_part_of_the_router(gradients, mesh):
    norms = torch.stack([gradients[name].norm() for name in ("up", "down", "router")])
    parts = norms**2 / torch.tensor([1, 1, mesh.size("expert")])
    total = parts.sum()
    mesh.add_up(total, ["expert"])
    return float(total**0.5)


# %% check_norm wrong: the router counts once per rank
def every_copy(gradients, mesh):
    total = sum(g.square().sum() for g in gradients.values())
    mesh.add_up(total, ["expert"])
    return total.sqrt().item()


# %% check_norm wrong: norms instead of squares
def sum_of_norms(gradients, mesh):
    experts = torch.stack([gradients["up"].norm(), gradients["down"].norm()]).norm()
    mesh.add_up(experts, ["expert"])
    return (experts**2 + gradients["router"].square().sum()).sqrt().item()


# %% check_norm wrong: the copies along data count, too
def along_data_too(gradients, mesh):
    experts = gradients["up"].square().sum() + gradients["down"].square().sum()
    mesh.add_up(experts, ["expert", "data"])
    return (experts + gradients["router"].square().sum()).sqrt().item()


# %% check_norm wrong: the number of data ranks is written into the code
def two_data_ranks(gradients, mesh):
    experts = gradients["up"].square().sum() + gradients["down"].square().sum()
    mesh.add_up(experts, ["expert", "data"])
    return (experts / 2 + gradients["router"].square().sum()).sqrt().item()


# %% check_norm blind line 5: any one rank of the group may count the router
# %% check_norm blind result. (NaN|another (dtype|sh)|detached): a number has none
# %% check_norm blind calls: each rank calls it once
