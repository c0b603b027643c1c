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
# all(c.allclose(copies[0], 0, 0, equal_nan=True) for c in copies) →
# parameter.allclose(copies[0], 0, 0, equal_nan=True)


# %% check_verify_replicas wrong: sums, which a permutation keeps
# c.allclose(copies[0] → c.sum().allclose(copies[0].sum()


# %% check_verify_replicas wrong: a NaN on every rank is an error, too
# equal_nan=True → equal_nan=False


# %% check_verify_replicas wrong: a NaN is never different
# c.allclose(copies[0], 0, 0, equal_nan=True) → not (c - copies[0]).nan_to_num().any()


# %% check_verify_replicas wrong: it names every parameter
# {name} → {[name for name, _ in module.named_parameters()]}


# %% check_verify_replicas wrong: the last parameter that differs
# for name, parameter in module.named_parameters(): →
# for name, parameter in list(module.named_parameters())[::-1]:


# %% check_verify_replicas wrong: only ranks 0 and 1 are compared
# for c in copies → for c in copies[:2]


# %% check_verify_replicas wrong: another kind of error
# RuntimeError → ValueError


# %% check_verify_replicas wrong: replicas are made equal before the error
# raise RuntimeError →
# parameter.data.copy_(copies[0])
#             raise RuntimeError
