"""Answers to try this chapter's checks on."""


# %% check_verify_start right: everything is gathered, and each rank compares
def compares_all(expected, *tensors):
    ranks = dist.get_world_size()
    everyone = [None] * ranks
    own = [(str(t.dtype), repr(t.tolist())) for t in tensors]
    dist.all_gather_object(everyone, own)
    if ranks != expected or any(of_rank != everyone[0] for of_rank in everyone):
        raise RuntimeError(f"{ranks} ranks, or different tensors")


# %% check_verify_start right: rank 0's tensors, and a flag
def against_rank_0(expected, *tensors):
    if dist.get_world_size() != expected:
        raise RuntimeError("the wrong number of ranks")
    own = [(t.shape, t.dtype) for t in tensors]
    kinds = [own]
    dist.broadcast_object_list(kinds, src=0)
    differs = torch.tensor(float(kinds[0] != own))
    dist.all_reduce(differs)
    for tensor in [] if differs else tensors:
        of_rank_0 = tensor.nan_to_num(1e9)
        dist.broadcast(of_rank_0, src=0)
        differs += not torch.equal(of_rank_0, tensor.nan_to_num(1e9))
    dist.all_reduce(differs)
    if differs > 0:
        raise RuntimeError("tensors differ between ranks")


# %% check_verify_start wrong: only the ranks that differ from rank 0 raise
# any(of_rank != everyone[0] for of_rank in everyone) →
# everyone[dist.get_rank()] != everyone[0]


# %% check_verify_start wrong: sums instead of values
# t.tolist() → t.double().sum().item()


# %% check_verify_start wrong: float32 and float64 are equal
# (str(t.dtype), repr(t.tolist())) → repr(t.tolist())


# %% check_verify_start wrong: a tensor too many is not compared
# for t in tensors] → for t in tensors[:2]]


# %% check_verify_start wrong: two ranks are enough
# ranks != expected → ranks < 2


# %% check_verify_start wrong: another kind of error
# RuntimeError → ValueError
