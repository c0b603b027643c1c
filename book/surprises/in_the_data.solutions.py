"""Answers to try this chapter's checks on."""


# %% check_stream right: a loop with a remainder
def by_remainder(stream, rank, world_size, worker, workers):
    for number, sample in enumerate(stream):
        if number % (world_size * workers) == rank * workers + worker:
            yield sample


# %% check_stream right: workers first, then ranks
def workers_first(stream, rank, world_size, worker, workers):
    return islice(stream, worker * world_size + rank, None, world_size * workers)


# %% check_stream wrong: dealt at random, alike on all workers
# number % (world_size * workers) →
# __import__("random").Random(number).randrange(world_size * workers)


# %% check_stream wrong: blocks of ten
# number % → number // 10 %


# %% check_stream wrong: the stream is read to its end first
# enumerate(stream) → enumerate(list(stream))


# %% check_stream wrong: the tail is dropped
def whole_rounds(stream, rank, world_size, worker, workers):
    size = world_size * workers
    while len(turn := list(islice(stream, size))) == size:
        yield turn[rank * workers + worker]


# %% check_stream wrong: dealt at random, by each worker anew
# for number → draws = __import__("random").Random(rank * workers + worker)
#     for number
# number % (world_size * workers) == rank * workers + worker →
# draws.randrange(world_size * workers) == 0


# %% check_stream wrong: every sample is in all shares, after a while
# if number → if number >= 40 or number

# %% check_stream wrong: dealt in the order of the calls
calls = count()


def by_calls(stream, rank, world_size, worker, workers):
    n = world_size * workers
    return islice(stream, next(calls) % n, None, n)
