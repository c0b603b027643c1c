"""Answers to try this chapter's checks on."""


# %% check_skipping right: a sum of losses, which a NaN makes NaN
def sum_of_losses(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
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
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        loss_in(step, ddp).backward()
        if all(p.grad.isfinite().all() for p in module.parameters()):
            optimizer.step()


# %% check_skipping wrong: rank 0 decides
def rank_0_decides(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        loss = loss_in(step, ddp)
        bad = (~loss.detach().isfinite()).float()
        dist.broadcast(bad, src=0)
        if bad:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# %% check_skipping wrong: the second step is skipped, always
def skips_the_second(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        loss = loss_in(step, ddp)
        if step == 1:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# %% check_skipping wrong: MIN, so that all ranks must be bad
def all_must_be_bad(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        loss = loss_in(step, ddp)
        bad = (~loss.detach().isfinite()).float()
        dist.all_reduce(bad, op=dist.ReduceOp.MIN)
        if bad:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# %% check_skipping wrong: the bad rank contributes zeros
def zeros_for_nan(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        loss = loss_in(step, ddp)
        if not loss.isfinite():
            loss = 0 * sum(p.sum() for p in ddp.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# %% check_skipping wrong: nothing is skipped
def steps_anyway(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        loss_in(step, ddp).backward()
        optimizer.step()


# %% check_skipping wrong: the skipped step's old gradient is used again
def old_gradient(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        loss = loss_in(step, ddp)
        bad = (~loss.detach().isfinite()).float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bad:
            optimizer.zero_grad()
            loss.backward()
        if step or not bad:
            optimizer.step()


# %% check_skipping wrong: NaN becomes zero, and the rest of the gradient is used
def nan_becomes_zero(module, loss_in):
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        loss_in(step, ddp).backward()
        for p in module.parameters():
            p.grad.nan_to_num_(0)
        optimizer.step()
