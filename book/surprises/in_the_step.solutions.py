"""Answers to try this chapter's checks on."""


# %% check_skipping right: a sum of losses, which a NaN makes NaN
def sum_of_losses(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        loss = loss_in(step, ddp)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if not total.isfinite():
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# %% check_skipping right: every rank runs backward, and looks at the average
def looks_at_the_average(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_in(step, ddp).backward()
        if all(p.grad.isfinite().all() for p in module.parameters()):
            optimizer.step()


# %% check_skipping wrong: the second step is skipped, always
# if not total.isfinite(): → if step == 1:


# %% check_skipping wrong: only a NaN is skipped
# if not total.isfinite(): → if total.isnan():


# %% check_skipping wrong: the bad rank contributes zeros
# loss = loss_in(step, ddp) → loss = loss_in(step, ddp)
#         if not loss.isfinite():
#             loss = 0 * sum(p.sum() for p in ddp.parameters())


# %% check_skipping wrong: the skipped step's old gradient is used again
# continue → optimizer.step()
#             continue


# %% check_skipping wrong: NaN becomes zero, and the rest of the gradient is used
# if not total.isfinite(): → if False:
# loss.backward() → loss.backward()
#         for p in module.parameters():
#             p.grad.nan_to_num_(0)


# %% check_skipping wrong: skipped only if exactly one rank is bad
# loss.detach().clone() → (~loss.detach().isfinite()).float()
# if not total.isfinite(): → if total == 1:


# %% check_two_losses right: autograd.grad for the first, then one backward of the sum
def grad_then_sum(ddp, rows):
    first, _ = two_losses(ddp.module, rows)
    own = torch.autograd.grad(first, list(ddp.parameters()))
    flat = torch.cat([gradient.flatten() for gradient in own])
    torch.distributed.all_reduce(flat)
    sum(two_losses(ddp, rows)).backward()
    return (flat / torch.distributed.get_world_size()).norm().item()


# %% check_two_losses right: the second gradient is averaged by hand
def second_by_hand(ddp, rows):
    two_losses(ddp, rows)[0].backward()
    norm = norm_of(ddp)
    two_losses(ddp.module, rows)[1].backward()
    for p in ddp.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad /= torch.distributed.get_world_size()
    return norm


# %% check_two_losses wrong: the first gradient is cleared
# sum(two_losses(ddp, rows)).backward() → two_losses(ddp, rows)[1].backward()


# %% check_two_losses wrong: the second backward under no_sync
# sum(two_losses(ddp, rows)).backward() → with ddp.no_sync():
#         sum(two_losses(ddp, rows)).backward()


# %% check_two_losses wrong: gradients are local afterwards
# return (flat → ddp.require_backward_grad_sync = False
#     return (flat


# %% check_decay right: the decay is applied by hand
def decay_by_hand(parameters):
    optimizer = SGD(parameters, lr=0.005)

    @torch.no_grad()
    def add_decay(*_):
        for p in parameters:
            p.grad += 0.2 * p

    optimizer.register_step_pre_hook(add_decay)
    return optimizer


# %% check_decay right: the gradient is halved, and nothing else changes
def halved_gradient(parameters):
    optimizer = SGD(parameters, lr=0.01, weight_decay=0.1)

    def halve(*_):
        for p in parameters:
            p.grad /= 2

    optimizer.register_step_pre_hook(halve)
    return optimizer


# %% check_decay wrong: AdamW, which cancels the factor
def another_optimizer(parameters):
    return AdamW(parameters, lr=0.01, weight_decay=0.1)


# %% check_skipping wrong: gradients of zero, and a step that momentum makes
# continue → optimizer.zero_grad(set_to_none=False)
#             optimizer.step()
#             continue


# %% check_decay blind gradient: there are none yet
# %% check_decay blind calls: it is called once
# %% check_two_losses blind frozen: no parameter is frozen
# %% check_two_losses blind NaN|clamped: no gradient is NaN, or above 10
# %% check_skipping blind frozen: no parameter is frozen
# %% check_skipping blind calls: each rank calls it once
