"""Modules that are slow to import; the fork server imports them once, for all ranks.

Only the fork server imports this module. It loads torch._dynamo, because torch's DDP and
optimizers import it on first use, which would cost every rank of every call one second.
"""

import gc
import signal

from labkit.launch.scheduling import schedule_as_batch

gc.disable()  # while a million objects are made that all stay: a quarter of the time

# An interrupt in the first call must not end the server half-way through its imports. The caller
# starts it with SIGINT blocked.
signal.signal(signal.SIGINT, signal.SIG_IGN)
if hasattr(signal, "pthread_sigmask"):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

import torch._dynamo  # noqa: E402, F401

import labkit.launch.forked_torchrun  # noqa: E402
import labkit.launch.rank_supervisor  # noqa: E402
import labkit.launch.warm_torchrun  # noqa: E402, F401

# What is frozen is not walked by a child's collector, so its memory stays shared with the server's.
gc.freeze()
gc.enable()
schedule_as_batch()  # the ranks inherit it
