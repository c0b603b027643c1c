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


# %% check_missing right: the default group's store
import datetime

from torch.distributed.distributed_c10d import _get_default_store


def through_the_store(tensor):
    store, missing = _get_default_store(), []
    store.set(f"here {dist.get_rank()}", "yes")
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=2)
    for rank in range(dist.get_world_size()):
        left = max(deadline - datetime.datetime.now(), datetime.timedelta(seconds=0.1))
        try:
            store.wait([f"here {rank}"], left)
        except RuntimeError:
            missing.append(rank)
    if missing:
        raise RuntimeError(f"ranks {missing} are missing")
    dist.all_reduce(tensor)


# %% check_missing right: the barrier, and the all-reduce where it is known to work
import datetime


def all_reduce_first(tensor):
    try:
        dist.monitored_barrier(
            timeout=datetime.timedelta(seconds=1.5), wait_all_ranks=True
        )
    except RuntimeError as error:
        raise RuntimeError(f"no all-reduce: {error}") from None
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()


# %% check_missing wrong: rank 2 is written into the code
import datetime


def always_rank_2(tensor):
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))
    except RuntimeError:
        raise RuntimeError("rank 2 is missing") from None
    dist.all_reduce(tensor)


# %% check_missing wrong: only the first missing rank
import datetime


def names_the_first(tensor):
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))
    dist.all_reduce(tensor)


# %% check_missing wrong: after eight seconds
import datetime


def after_eight_seconds(tensor):
    eight_seconds = datetime.timedelta(seconds=8)
    dist.monitored_barrier(timeout=eight_seconds, wait_all_ranks=True)
    dist.all_reduce(tensor)


# %% check_missing wrong: a barrier that waits for everyone
def plain_barrier(tensor):
    dist.barrier()
    dist.all_reduce(tensor)


# %% check_missing wrong: no all-reduce
import datetime


def barrier_alone(tensor):
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=2), wait_all_ranks=True)


# %% check_missing right: a sentence with other numbers in it
import datetime


def in_a_sentence(tensor):
    two = datetime.timedelta(seconds=2)
    try:
        dist.monitored_barrier(timeout=two, wait_all_ranks=True)
    except RuntimeError as error:
        if dist.get_rank() > 0:
            raise
        _, _, after = str(error).partition("Ranks ")
        ranks = after.partition(" failed")[0].split(", ")
        raise RuntimeError(
            f"{len(ranks)} of 4 ranks did not arrive within 2 s: {', '.join(ranks)}"
        ) from None
    dist.all_reduce(tensor)


# %% check_samples right: recursion
def larger(world, way, samples=1):
    whole = step_seconds(world, way, plan(), samples * world)
    if whole * 0.9 < compute(world, samples * world).end:
        return samples
    return larger(world, way, 2 * samples)


# %% check_samples right: the first exponent
def first_exponent(world, way):
    def waits(samples):
        batch = samples * world
        return 1 - compute(world, batch).end / step_seconds(world, way, plan(), batch)

    return 2 ** next(k for k in range(20) if waits(2**k) < 0.1)


# %% check_samples wrong: one doubling too many
def one_too_many(world, way):
    samples, waits = 1, 1.0
    while waits >= 0.1:
        batch = samples * world
        waits = 1 - compute(world, batch).end / step_seconds(world, way, plan(), batch)
        samples *= 2
    return samples


# %% check_samples wrong: the numbers for 16,384 ranks
def from_a_table(world, way):
    return {"flat ring": 512, "hierarchical": 256, "tree": 4}[way]


# %% check_samples wrong: the same all-reduce for all
def always_a_ring(world, way):
    samples = 1
    while True:
        batch = samples * world
        whole = step_seconds(world, "flat ring", plan(), batch)
        if 1 - compute(world, batch).end / whole < 0.1:
            return samples
        samples *= 2
