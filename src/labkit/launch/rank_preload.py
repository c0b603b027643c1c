"""Modules that are slow to import; the fork server imports them once, for all ranks.

Only the fork server imports this module. It loads torch._dynamo, because torch's DDP and
optimizers import it on first use, which would cost every rank of every call one second.
At the end it moves the loaded memory to pages of 2 MiB, which makes every fork faster.
"""

import signal

from grader.inside.large_pages import gather_memory
from labkit.launch.guard import own_session
from labkit.launch.loading import loading
from labkit.launch.scheduling import schedule_as_batch

# An interrupt in the first call must not end the server half-way through its imports. The caller
# starts it with SIGINT blocked.
signal.signal(signal.SIGINT, signal.SIG_IGN)
if hasattr(signal, "pthread_sigmask"):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

# A notebook's kernel, before it ends, waits for the children in its process group.
own_session()

with loading():
    import torch._dynamo  # noqa: F401

    import labkit.launch.forked_torchrun
    import labkit.launch.rank_supervisor
    import labkit.launch.warm_torchrun  # noqa: F401

gather_memory()
schedule_as_batch()  # the ranks inherit it
