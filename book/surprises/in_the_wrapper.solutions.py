"""Answers to try this chapter's checks on."""


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


# %% check_two_losses wrong: one backward, and the norm of the sum
def norm_of_the_sum(ddp, rows):
    sum(two_losses(ddp, rows)).backward()
    return norm_of(ddp)


# %% check_two_losses wrong: the first backward is local, and so is its norm
def local_norm(ddp, rows):
    with ddp.no_sync():
        two_losses(ddp, rows)[0].backward()
    norm = norm_of(ddp)
    two_losses(ddp, rows)[1].backward()
    return norm


# %% check_two_losses wrong: the first gradient is cleared
def first_cleared(ddp, rows):
    two_losses(ddp, rows)[0].backward()
    norm = norm_of(ddp)
    ddp.zero_grad()
    two_losses(ddp, rows)[1].backward()
    return norm


# %% check_two_losses wrong: the sum is halved
def halved(ddp, rows):
    (two_losses(ddp, rows)[0] / 2).backward()
    norm = 2 * norm_of(ddp)
    (two_losses(ddp, rows)[1] / 2).backward()
    return norm


# %% check_two_losses wrong: the second backward under no_sync
def second_is_local(ddp, rows):
    two_losses(ddp, rows)[0].backward()
    norm = norm_of(ddp)
    with ddp.no_sync():
        two_losses(ddp, rows)[1].backward()
    return norm


# %% check_two_losses wrong: no norm is returned
def returns_nothing(ddp, rows):
    sum(two_losses(ddp, rows)).backward()
