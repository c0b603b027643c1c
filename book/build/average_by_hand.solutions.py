"""Answers to try this chapter's checks on."""


# %% check_none right: the flags of all ranks are gathered
@torch.no_grad()
def gathers_flags(model):
    parameters = list(model.parameters())
    flags = torch.tensor([p.grad is not None for p in parameters])
    of_ranks = [torch.empty_like(flags) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, flags)
    for parameter, exists in zip(parameters, torch.stack(of_ranks).any(0), strict=True):
        if exists:
            own = (
                torch.zeros_like(parameter)
                if parameter.grad is None
                else parameter.grad
            )
            parameter.grad = own / dist.get_world_size()
            dist.all_reduce(parameter.grad)


# %% check_none right: MAX, and frozen parameters are left out first
@torch.no_grad()
def max_of_flags(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    flags = torch.tensor([int(p.grad is not None) for p in parameters])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    for number in flags.nonzero().flatten().tolist():
        parameter = parameters[number]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(dist.get_world_size())
        dist.all_reduce(parameter.grad)


# %% check_none wrong: rank 0's flags count for all
@torch.no_grad()
def rank_0_decides(model):
    parameters = list(model.parameters())
    flags = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.broadcast(flags, src=0)
    for parameter, exists in zip(parameters, flags, strict=True):
        if exists:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


# %% check_none wrong: zeros for every gradient
@torch.no_grad()
def zeros_everywhere(model):
    parameters = list(model.parameters())
    dist.all_reduce(torch.zeros(len(parameters)))
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


# %% check_none wrong: one flag per message
@torch.no_grad()
def a_message_per_flag(model):
    for parameter in model.parameters():
        flag = torch.tensor([float(parameter.grad is not None)])
        dist.all_reduce(flag)
        if flag:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


# %% check_none wrong: divided by the ranks that have the gradient
@torch.no_grad()
def divided_by_the_owners(model):
    parameters = list(model.parameters())
    flags = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(flags)
    for parameter, owners in zip(parameters, flags, strict=True):
        if owners:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= owners
            dist.all_reduce(parameter.grad)


# %% check_none wrong: divided after the sum
@torch.no_grad()
def divided_after(model):
    parameters = list(model.parameters())
    flags = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(flags)
    for parameter, exists in zip(parameters, flags, strict=True):
        if exists:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


# %% check_none wrong: sent, but None again where this rank had none
@torch.no_grad()
def none_where_it_was_none(model):
    parameters = list(model.parameters())
    own = [p.grad is not None for p in parameters]
    flags = torch.tensor([float(one) for one in own])
    dist.all_reduce(flags)
    for parameter, had_it, exists in zip(parameters, own, flags, strict=True):
        if exists:
            average = parameter.grad if had_it else torch.zeros_like(parameter)
            average /= dist.get_world_size()
            dist.all_reduce(average)
            parameter.grad = average if had_it else None


# %% check_half right: float64, and one message
@torch.no_grad()
def in_float64(model):
    parameters = list(model.parameters())
    wide = torch.cat([p.grad.double().flatten() for p in parameters])
    dist.all_reduce(wide)
    wide /= dist.get_world_size()
    parts = wide.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


# %% check_half right: all are gathered, and averaged in float32
@torch.no_grad()
def gathered(model):
    for parameter in model.parameters():
        of_ranks = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, parameter.grad)
        parameter.grad = torch.stack(of_ranks).float().mean(0).half()


# %% check_half wrong: divided before the sum
@torch.no_grad()
def divided_before(model):
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


# %% check_half wrong: bfloat16, with too few digits
@torch.no_grad()
def in_bfloat16(model):
    for parameter in model.parameters():
        wide = parameter.grad.bfloat16()
        dist.all_reduce(wide)
        parameter.grad = (wide / dist.get_world_size()).half()


# %% check_half wrong: divided by √W at both ends
@torch.no_grad()
def root_at_both_ends(model):
    root = dist.get_world_size() ** 0.5
    for parameter in model.parameters():
        parameter.grad /= root
        dist.all_reduce(parameter.grad)
        parameter.grad /= root


# %% check_half wrong: each rank chooses by the size of its own number
@torch.no_grad()
def own_choice(model):
    for parameter in model.parameters():
        ranks, large = dist.get_world_size(), parameter.grad.abs() > 1
        parameter.grad[large] /= ranks
        dist.all_reduce(parameter.grad)
        parameter.grad[~large] /= ranks


# %% check_half wrong: the gradient stays float32
@torch.no_grad()
def stays_wide(model):
    for parameter in model.parameters():
        wide = parameter.grad.float()
        dist.all_reduce(wide)
        parameter.grad_dtype = None
        parameter.grad = wide / dist.get_world_size()


# %% check_half wrong: the sum is clipped to what float16 holds
@torch.no_grad()
def clipped(model):
    for parameter in model.parameters():
        wide = parameter.grad.float()
        dist.all_reduce(wide)
        parameter.grad = wide.clamp(max=65_504).half() / dist.get_world_size()


# %% check_half blind calls: check_none calls an average four times
# %% check_half blind frozen: the exercise has no frozen parameter
