"""Answers to try this chapter's checks on."""

# %% check_groups right: new_group for each list
import torch.distributed as dist


def one_by_one():
    nodes = [[0, 2, 4, 6], [1, 3, 5, 7]]
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    groups = [(ranks, dist.new_group(ranks)) for ranks in nodes + pairs]
    own = [group for ranks, group in groups if dist.get_rank() in ranks]
    return Nodes(*own)


# %% check_groups right: a table of ranks, and its transpose
def from_a_table():
    enumeration = torch.distributed.new_subgroups_by_enumeration
    ranks = torch.arange(8).view(4, 2)
    return Nodes(enumeration(ranks.T.tolist())[0], enumeration(ranks.tolist())[0])


# %% check_groups wrong: inside and across are exchanged
def exchanged():
    groups = torch.distributed.new_subgroups_by_enumeration
    inside, _ = groups([[0, 2, 4, 6], [1, 3, 5, 7]])
    across, _ = groups([[0, 1], [2, 3], [4, 5], [6, 7]])
    return Nodes(across, inside)


# %% check_groups wrong: the pairs hold different parts
def mixed_pairs():
    groups = torch.distributed.new_subgroups_by_enumeration
    inside, _ = groups([[0, 2, 4, 6], [1, 3, 5, 7]])
    across, _ = groups([[0, 3], [2, 1], [4, 7], [6, 5]])
    return Nodes(inside, across)


# %% check_groups wrong: nodes of consecutive ranks
def consecutive():
    groups = torch.distributed.new_subgroups_by_enumeration
    inside, _ = groups([[0, 1, 2, 3], [4, 5, 6, 7]])
    across, _ = groups([[0, 4], [1, 5], [2, 6], [3, 7]])
    return Nodes(inside, across)


# %% check_groups wrong: half nodes
def half_nodes():
    groups = torch.distributed.new_subgroups_by_enumeration
    inside, _ = groups([[0, 2], [1, 3], [4, 6], [5, 7]])
    across, _ = groups([[0, 1, 4, 5], [2, 3, 6, 7]])
    return Nodes(inside, across)


# %% check_groups wrong: nothing crosses
def inside_twice():
    groups = torch.distributed.new_subgroups_by_enumeration
    inside, _ = groups([[0, 2, 4, 6], [1, 3, 5, 7]])
    return Nodes(inside, inside)
