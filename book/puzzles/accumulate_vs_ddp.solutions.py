"""Answers to try this chapter's checks on."""


# %% check_verify_start right: everything is gathered, and each rank compares
def compares_all(expected, *tensors):
    ranks = dist.get_world_size()
    everyone = [None] * ranks
    dist.all_gather_object(everyone, [repr(tensor.tolist()) for tensor in tensors])
    if ranks != expected or any(of_rank != everyone[0] for of_rank in everyone):
        raise RuntimeError(f"{ranks} ranks, or different tensors")


# %% check_verify_start right: rank 0's tensors, and a flag
def against_rank_0(expected, *tensors):
    if dist.get_world_size() != expected:
        raise RuntimeError("the wrong number of ranks")
    differs, shapes = torch.zeros(1), [[tensor.shape for tensor in tensors]]
    dist.broadcast_object_list(shapes, src=0)
    for tensor, shape in zip(tensors, shapes[0], strict=True):
        of_rank_0 = tensor.nan_to_num(1e9).reshape(shape)
        dist.broadcast(of_rank_0, src=0)
        same = tensor.shape == shape and torch.equal(of_rank_0, tensor.nan_to_num(1e9))
        differs += not same
    dist.all_reduce(differs)
    if differs > 0:
        raise RuntimeError("tensors differ between ranks")


# %% check_verify_start wrong: only the ranks that differ from rank 0 raise
# any(of_rank != everyone[0] for of_rank in everyone) →
# everyone[dist.get_rank()] != everyone[0]


# %% check_verify_start wrong: sums instead of values
# tensor.tolist() → tensor.double().sum().item()


# %% check_verify_start wrong: two ranks are enough
# ranks != expected → ranks < 2


# %% check_verify_start wrong: another kind of error
# RuntimeError → ValueError
