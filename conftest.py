"""What holds for every test and chapter, on a machine that is busy with others of them."""

import os

from hypothesis import settings

# One thread a process: each test starts processes that are as many as the cores, or more. Threads
# of several processes on one core wait for each other in a loop: what takes a second takes ten.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may wait for a core for longer than the fifth of a second that it is allowed.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")
