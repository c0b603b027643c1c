"""Answers to try this chapter's checks on."""


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


# %% check_none wrong: zeros for every gradient
# flags.nonzero().flatten().tolist() → range(len(flags))


# %% check_none wrong: divided by the ranks that have the gradient
# dist.ReduceOp.MAX → dist.ReduceOp.SUM
# dist.get_world_size() → flags[number]


# %% check_none wrong: divided after the sum
# parameter.grad.div_(dist.get_world_size()) → pass
# dist.all_reduce(parameter.grad) → dist.all_reduce(parameter.grad)
#         parameter.grad.div_(dist.get_world_size())


# %% check_none wrong: a gradient of zeros becomes None
# int(p.grad is not None) → int(p.grad is not None and bool(p.grad.any()))
# for number in → for number in (flags == 0).nonzero().flatten().tolist():
#         parameters[number].grad = None
#     for number in


# %% check_none wrong: sent, but None again where this rank had none
# if parameter.grad is None: → own = parameter.grad
#         if own is None:
# dist.all_reduce(parameter.grad) → dist.all_reduce(parameter.grad)
#         parameter.grad = None if own is None else parameter.grad


# %% check_none wrong: zeros for a frozen parameter, too
# [p for p in model.parameters() if p.requires_grad] → list(model.parameters())
# int(p.grad is not None) → int(p.grad is not None or not p.requires_grad)


# %% check_none wrong: zeros are sent for a frozen parameter, which keeps None
# [p for p in model.parameters() if p.requires_grad] → list(model.parameters())
# int(p.grad is not None) → int(p.grad is not None or not p.requires_grad)
# dist.all_reduce(parameter.grad) → dist.all_reduce(parameter.grad)
#         if not parameter.requires_grad:
#             parameter.grad = None


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
# p.grad.double() → (p.grad / dist.get_world_size()).double()
# wide /= dist.get_world_size() → pass


# %% check_half wrong: bfloat16, with too few digits
# double → bfloat16


# %% check_half wrong: each rank chooses by the size of its own number
@torch.no_grad()
def own_choice(model):
    for parameter in model.parameters():
        ranks, large = dist.get_world_size(), parameter.grad.abs() > 1
        parameter.grad[large] /= ranks
        dist.all_reduce(parameter.grad)
        parameter.grad[~large] /= ranks


# %% check_half wrong: the gradient stays float32
# parameter.grad.copy_(part.view_as(parameter)) → parameter.grad_dtype = None
#         parameter.grad = part.view_as(parameter)


# %% check_half wrong: the sum is clipped to what float16 holds
# wide /= dist.get_world_size() → wide.clamp_(max=65_504).div_(dist.get_world_size())


# %% check_half wrong: an infinite average is clipped
# part.view_as(parameter) → part.view_as(parameter).clamp(max=65_504)


# %% check_none blind frozen: what is frozen has no gradient
# %% check_none blind MAX → .*SUM: any sum above 0 says that one rank has it
