"""Answers to try this chapter's checks on."""


# %% check_start right: everybody else contributes zeros to a sum
@torch.no_grad()
def sum_with_zeros(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        if dist.get_rank() > 0:
            tensor.zero_()
        dist.all_reduce(tensor)


# %% check_start right: the whole state as one object
@torch.no_grad()
def as_one_object(model):
    own = [*model.parameters(), *model.buffers()]
    state = [own]
    dist.broadcast_object_list(state, src=0)
    for tensor, of_rank_0 in zip(own, state[0], strict=True):
        tensor.copy_(of_rank_0)


# %% check_start right: the constructor of DDP, and the wrapper is thrown away
def by_wrapping(model):
    DistributedDataParallel(model)


# %% check_start wrong: the same seed, drawn again
def drawn_again(model):
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()


# %% check_start wrong: buffers that the state leaves out
# [*model.parameters(), *model.buffers()] → model.state_dict().values()


# %% check_start wrong: new parameters
def new_parameters(model):
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            copy = parameter.detach().clone()
            dist.broadcast(copy, src=0)
            setattr(layer, name, nn.Parameter(copy, parameter.requires_grad))
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


# %% check_start wrong: a copy is sent, and nobody loads it
# dist.all_reduce(tensor) → dist.all_reduce(tensor.clone())


# %% check_start wrong: it leaves the model in evaluation mode
# for tensor in → model.eval()
#     for tensor in
