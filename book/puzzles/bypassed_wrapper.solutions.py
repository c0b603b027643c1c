"""Answers to try this chapter's checks on."""


# %% check_verify_replicas right: all values are gathered
def gathered(module):
    for name, parameter in module.named_parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.detach())
        if not all(c.allclose(copies[0], 0, 0, equal_nan=True) for c in copies):
            raise RuntimeError(f"{name} differs between ranks")


# %% check_verify_replicas right: rank 0's values, and one flag per parameter
def against_rank_0(module):
    names, differs = [], []
    for name, parameter in module.named_parameters():
        own = parameter.detach().nan_to_num(nan=1e30)
        of_rank_0 = own.clone()
        dist.broadcast(of_rank_0, src=0)
        names.append(name)
        differs.append(float(not torch.equal(own, of_rank_0)))
    flags = torch.tensor(differs)
    dist.all_reduce(flags)
    different = [name for name, flag in zip(names, flags, strict=True) if flag]
    if different:
        raise RuntimeError(f"different: {', '.join(different)}")


# %% check_verify_replicas wrong: only the ranks that differ from rank 0 raise
def others_raise(module):
    for name, parameter in module.named_parameters():
        of_rank_0 = parameter.detach().clone()
        dist.broadcast(of_rank_0, src=0)
        if not of_rank_0.allclose(parameter, 0, 0, equal_nan=True):
            raise RuntimeError(f"{name} differs from rank 0's")


# %% check_verify_replicas wrong: sums, which a permutation keeps
def compares_sums(module):
    for name, parameter in module.named_parameters():
        total = parameter.detach().double().nan_to_num(nan=1e9).sum()
        low, high = total.clone(), total.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        if high - low > 1e-9:
            raise RuntimeError(f"{name} differs between ranks")


# %% check_verify_replicas wrong: a NaN on every rank is an error, too
def nan_is_different(module):
    for name, parameter in module.named_parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.detach())
        if not all(torch.equal(copy, copies[0]) for copy in copies):
            raise RuntimeError(f"{name} differs between ranks")


# %% check_verify_replicas wrong: a NaN is never different
def nan_is_left_out(module):
    for name, parameter in module.named_parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.detach())
        if any((copy - copies[0]).abs().nan_to_num().max() > 0 for copy in copies):
            raise RuntimeError(f"{name} differs between ranks")


# %% check_verify_replicas wrong: it names every parameter
def names_all(module):
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    if not all(c.allclose(copies[0], 0, 0, equal_nan=True) for c in copies):
        names = ", ".join(name for name, _ in module.named_parameters())
        raise RuntimeError(f"one of these differs: {names}")


# %% check_verify_replicas wrong: only ranks 0 and 1 are compared
def first_two_ranks(module):
    for name, parameter in module.named_parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.detach())
        if not copies[0].allclose(copies[1], 0, 0, equal_nan=True):
            raise RuntimeError(f"{name} differs between ranks")


# %% check_verify_replicas wrong: norms, which a permutation keeps
def compares_norms(module):
    for name, parameter in module.named_parameters():
        of_ranks = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, parameter.detach().norm())
        if not all(n.allclose(of_ranks[0], 0, 0, equal_nan=True) for n in of_ranks):
            raise RuntimeError(f"{name} differs between ranks")


# %% check_verify_replicas wrong: another kind of error
def value_error(module):
    for name, parameter in module.named_parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.detach())
        if not all(c.allclose(copies[0], 0, 0, equal_nan=True) for c in copies):
            raise ValueError(f"{name} differs between ranks")


# %% check_verify_replicas blind line 6. 0 → 1: any rank may be the reference
