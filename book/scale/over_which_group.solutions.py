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


# %% check_row_parallel wrong: half of the bias, with the 2 written into the code
# mesh.size("tensor") → 2


# %% check_row_parallel wrong: the bias gets no gradient
# bias / → bias.detach() /


# %% check_row_parallel wrong: right under DTensor's convention
# bias / mesh.size("tensor") → bias + (bias / mesh.size("tensor") - bias).detach()


# %% check_row_parallel wrong: summed along data
# )), "tensor") → )), "data")


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


# %% check_norm wrong: the copies along data count, too
# ["expert"] → ["expert", "data"]


# %% check_norm wrong: it takes a gradient out of the dictionary
# return total.sqrt().item() → del gradients["router"]
#     return total.sqrt().item()


# %% check_row_parallel wrong: a constant that the softmax hides
# )), "tensor") → )), "tensor") + 1


# %% check_row_parallel blind result. NaN: no output is NaN
