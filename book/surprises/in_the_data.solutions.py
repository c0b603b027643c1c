"""Answers to try this chapter's checks on."""


# %% check_stream right: a loop with a remainder
def by_remainder(stream, rank, world_size, worker, workers):
    for number, sample in enumerate(stream):
        if number % (world_size * workers) == rank * workers + worker:
            yield sample


# %% check_stream right: workers first, then ranks
def workers_first(stream, rank, world_size, worker, workers):
    return islice(stream, worker * world_size + rank, None, world_size * workers)


# %% check_stream right: split over ranks, then over workers
def in_two_stages(stream, rank, world_size, worker, workers):
    of_rank = islice(stream, rank, None, world_size)
    return islice(of_rank, worker, None, workers)


# %% check_stream wrong: dealt at random, alike on all workers
import random


def at_random(stream, rank, world_size, worker, workers):
    draws = random.Random(0)
    for sample in stream:
        if draws.randrange(world_size * workers) == rank * workers + worker:
            yield sample


# %% check_stream wrong: blocks of ten
def in_blocks(stream, rank, world_size, worker, workers):
    for number, sample in enumerate(stream):
        if number // 10 % (world_size * workers) == rank * workers + worker:
            yield sample


# %% check_stream wrong: the stream is read to its end first
def listed(stream, rank, world_size, worker, workers):
    samples = list(stream)
    yield from samples[rank * workers + worker :: world_size * workers]


# %% check_stream wrong: the tail is dropped
def whole_rounds(stream, rank, world_size, worker, workers):
    size = world_size * workers
    while len(turn := list(islice(stream, size))) == size:
        yield turn[rank * workers + worker]


# %% check_stream wrong: dealt at random, by each worker anew
import random


def each_at_random(stream, rank, world_size, worker, workers):
    own = random.Random(rank * workers + worker)
    for sample in stream:
        if own.randrange(world_size * workers) == 0:
            yield sample


# %% check_stream wrong: every sample is in all shares, after a while
# if number → if number >= 40 or number

# %% check_stream wrong: dealt in the order of the calls
calls = count()


def by_calls(stream, rank, world_size, worker, workers):
    n = world_size * workers
    return islice(stream, next(calls) % n, None, n)
