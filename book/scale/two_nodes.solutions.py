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
# Nodes(*own) → Nodes(*own[::-1])


# %% check_groups wrong: the pairs hold different parts
# [[0, 1], [2, 3], [4, 5], [6, 7]] → [[0, 3], [2, 1], [4, 7], [6, 5]]


# %% check_groups wrong: nodes of consecutive ranks
# [[0, 2, 4, 6], [1, 3, 5, 7]] → [[0, 1, 2, 3], [4, 5, 6, 7]]
# [[0, 1], [2, 3], [4, 5], [6, 7]] → [[0, 4], [1, 5], [2, 6], [3, 7]]


# %% check_groups wrong: half nodes
# [[0, 2, 4, 6], [1, 3, 5, 7]] → [[0, 2], [1, 3], [4, 6], [5, 7]]
# [[0, 1], [2, 3], [4, 5], [6, 7]] → [[0, 1, 4, 5], [2, 3, 6, 7]]


# %% check_groups wrong: nothing crosses
# Nodes(*own) → Nodes(own[0], own[0])


# %% check_missing right: the default group's store
import datetime

from torch.distributed.distributed_c10d import _get_default_store

calls = []


def through_the_store(tensor):
    calls.append(tensor)
    store, missing = _get_default_store(), []
    store.set(f"here {dist.get_rank()} {len(calls)}", "yes")
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=2)
    for rank in range(dist.get_world_size()):
        left = max(deadline - datetime.datetime.now(), datetime.timedelta(seconds=0.1))
        try:
            store.wait([f"here {rank} {len(calls)}"], left)
        except RuntimeError:
            missing.append(rank)
    if missing:
        raise RuntimeError(f"ranks {missing} are missing")
    dist.all_reduce(tensor)


# %% check_missing right: the ranks are in the last line, and other numbers, too
import datetime


def in_the_last_line(tensor):
    two = datetime.timedelta(seconds=2)
    try:
        dist.monitored_barrier(timeout=two, wait_all_ranks=True)
    except RuntimeError as error:
        if dist.get_rank() > 0:
            raise
        _, _, after = str(error).partition("Ranks ")
        ranks = [int(rank) for rank in after.partition(" failed")[0].split(", ")]
        raise RuntimeError(
            f"step 1: the barrier timed out.\n{len(ranks)} ranks ({len(ranks)} of 4) "
            f"are missing after 2 s: {ranks}"
        ) from None
    dist.all_reduce(tensor)


# %% check_missing wrong: the keys of an earlier call are still there
# {dist.get_rank()} {len(calls)} → {dist.get_rank()}
# {rank} {len(calls)} → {rank}


# %% check_missing wrong: rank 2 is written into the code
# ranks {missing} are → rank 2 is


# %% check_missing wrong: only the first missing rank
# {missing} → {missing[:1]}


# %% check_missing wrong: after eight seconds
# seconds=2 → seconds=8


# %% check_missing wrong: every call waits
# store.set( → __import__("time").sleep(1.2)
#     store.set(


# %% check_missing wrong: a barrier that waits for everyone
def plain_barrier(tensor):
    dist.barrier()
    dist.all_reduce(tensor)


# %% check_missing wrong: no all-reduce
# dist.all_reduce(tensor) → pass


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


# %% check_samples wrong: the numbers for 16,384 ranks
def from_a_table(world, way):
    return {"flat ring": 512, "hierarchical": 256, "tree": 4}[way]


# %% check_samples wrong: the same all-reduce for all
# step_seconds(world, way → step_seconds(world, "flat ring"


# %% check_samples wrong: waiting divided by computing
# if whole * 0.9 < compute(world, samples * world).end: →
# if whole < 1.1 * compute(world, samples * world).end:


# %% check_samples wrong: the search begins at 2
# samples=1 → samples=2


# %% check_groups blind calls: it is called once
# %% check_missing blind statement, line (9|16|18): done twice, it is the same
# %% check_missing blind 2 → [13]: about two seconds
