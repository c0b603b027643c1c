"""Answers to try this chapter's checks on."""

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
