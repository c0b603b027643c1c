"""Answers to try this chapter's checks on."""

# %% check_caps right: one byte less than each bucket has
one_byte_less = [(nbytes - 1) / MIB for nbytes in planned]

# %% check_caps right: a tuple, from the plan
from_the_plan = tuple(
    sum(sizes[place] for place in bucket) / 2**20 for bucket in plans["planned"]
)

# %% check_caps wrong: megabytes
megabytes = [nbytes / 1e6 for nbytes in planned]

# %% check_caps wrong: bytes
in_bytes = list(planned)

# %% check_caps wrong: rounded to MiB
rounded = [max(1, round(nbytes / MIB)) for nbytes in planned]

# %% check_caps wrong: cumulative sizes
from itertools import accumulate

cumulative = [nbytes / MIB for nbytes in accumulate(planned)]

# %% check_caps wrong: from the last bucket to the first
backwards = [nbytes / MIB for nbytes in reversed(planned)]

# %% check_caps wrong: only the first bucket
first_bucket = [planned[0] / MIB]

# %% check_caps wrong: the number of gradients of each bucket
numbers_of_gradients = [len(bucket) for bucket in plans["planned"]]


# %% check_caps wrong: an empty list
no_caps = []

# %% check_caps wrong: infinite caps
infinite = [float("inf")] * len(planned)


# %% check_caps blind line 2. 1 → [02]: a bucket is closed at any of these sizes
