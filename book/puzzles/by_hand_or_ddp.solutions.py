"""Answers to try this chapter's checks on."""


# %% check_all_reduce right: the library's own
def hierarchical(tensor):
    groups = collectives.Nodes.groups(ranks_per_node=4)
    collectives.hierarchical_all_reduce(tensor, nodes=groups)


# %% check_all_reduce right: a reduce inside, the leaders across, a broadcast
def reduce_and_broadcast(tensor):
    rank = dist.get_rank()
    nodes = [dist.new_group(range(first, first + 4)) for first in (0, 4)]
    leaders, leader = dist.new_group([0, 4]), rank - rank % 4
    dist.reduce(tensor, dst=leader, group=nodes[rank // 4])
    if rank == leader:
        collectives.naive_all_reduce(tensor, group=leaders)
    dist.broadcast(tensor, src=leader, group=nodes[rank // 4])
    dist.barrier()


# %% check_all_reduce wrong: one ring over all ranks
def one_ring(tensor):
    collectives.ring_all_reduce(tensor)


# %% check_all_reduce wrong: every rank sends everything
def naive(tensor):
    collectives.naive_all_reduce(tensor)


# %% check_all_reduce wrong: torch's own, which is not counted
def torchs_own(tensor):
    dist.all_reduce(tensor)


# %% check_all_reduce wrong: only the leaders get the total
def without_broadcast(tensor):
    node, seat = divmod(dist.get_rank(), 4)
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7], [0, 4])]
    collectives.ring_all_reduce(tensor, group=groups[node])
    if seat == 0:
        collectives.ring_all_reduce(tensor, group=groups[2])
    dist.barrier()


# %% check_all_reduce wrong: nothing crosses between the nodes
def inside_only(tensor):
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])]
    collectives.ring_all_reduce(tensor, group=groups[dist.get_rank() // 4])


# %% check_all_reduce wrong: every rank talks to its partner, at full size
def four_pairs(tensor):
    node, seat = divmod(dist.get_rank(), 4)
    nodes = [dist.new_group(range(first, first + 4)) for first in (0, 4)]
    pairs = [dist.new_group([first, first + 4]) for first in range(4)]
    collectives.ring_all_reduce(tensor, group=nodes[node])
    collectives.ring_all_reduce(tensor, group=pairs[seat])


# %% check_average right: one object per rank, and zeros
def flags_as_objects(model):
    params = list(model.parameters())
    flags = [None] * dist.get_world_size()
    dist.all_gather_object(flags, [p.grad is not None for p in params])
    for param, *of_ranks in zip(params, *flags, strict=True):
        if any(of_ranks):
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad /= len(of_ranks)
            dist.all_reduce(param.grad)


# %% check_average right: all gradients and flags in one message
def one_message(model):
    params = list(model.parameters())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flags = torch.tensor([float(p.grad is not None) for p in params])
    flat = torch.cat([*(g.flatten() for g in grads), flags]) / dist.get_world_size()
    dist.all_reduce(flat)
    *parts, flags = flat.split([*(p.numel() for p in params), len(params)])
    for param, part, flag in zip(params, parts, flags, strict=True):
        param.grad = part.view_as(param) if flag > 0 else None


# %% check_average wrong: a missing gradient is skipped
def skips_none(model):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


# %% check_average wrong: rank 0's flags count for all
def rank_0_decides(model):
    params = list(model.parameters())
    flags = torch.tensor([float(p.grad is not None) for p in params])
    dist.broadcast(flags, src=0)
    for param, exists in zip(params, flags, strict=True):
        if exists:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


# %% check_average wrong: zeros everywhere
def zeros_everywhere(model):
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


# %% check_average wrong: divided by the ranks that have the gradient
def divided_by_the_owners(model):
    params = list(model.parameters())
    flags = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(flags)
    for param, owners in zip(params, flags, strict=True):
        if owners:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= owners


# %% check_average wrong: the gradient must exist on all ranks
def all_or_none(model):
    params = list(model.parameters())
    flags = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    for param, exists in zip(params, flags, strict=True):
        if exists:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        else:
            param.grad = None


# %% check_average wrong: the sum
def not_divided(model):
    params = list(model.parameters())
    flags = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(flags)
    for param, owners in zip(params, flags, strict=True):
        if owners:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
