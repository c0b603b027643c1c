"""One thread a process, for every test and chapter, and for all that they start.

Each starts processes that are as many as the cores, or more. Threads of several processes on one
core wait for each other in a loop, and what takes a second takes ten.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
