"""Imported by the fork server, once, so that no rank has to: whatever is slow to import.

Nobody else imports this module. torch._dynamo is here because torch's own DDP and its optimizers
import it when they are first used: a second of every rank, in every call.
"""

import gc
import signal

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
gc.collect()
gc.freeze()
