"""Data parallelism from scratch, to be read: how the gradients of many processes become one.

In reading order, one idea a file:

==========================  ==================================================================
`manual`                    average the gradients by hand, after backward
`collectives`               all-reduce from send and receive: naive, ring, recursive doubling
`buckets`                   which parameter lies in which bucket: pure functions
`ladder`                    five rungs from one message a parameter to buckets that overlap
`reducer`                   the bucketed, overlapped reducer: hooks, launches, finalization
`ddp`                       `MiniDDP`, the drop-in for torch's DistributedDataParallel
`comm_hooks`                what may take the place of the all-reduce
`data_parallel`             `MiniDataParallel`: one process, many devices, gradients that sum
`losses`                    which loss each rank has to back-propagate
`differentiable`            collectives that autograd knows, for losses over all ranks' items
`sync_batch_norm`           batch normalization over the batch of all ranks
==========================  ==================================================================

Behind `reducer` and `ddp` stand `gradient_bucket`, `autograd_graph`, `replicas`, `join`, `strict`,
`first_steps` and `reducer_errors`; `drop_in`, `compiling` and `mixed_precision` hold what exists
for compatibility alone.

For one evening, the way of a gradient: `manual`, `buckets`, `gradient_bucket`, `autograd_graph`,
`replicas`, `reducer`, `ddp`. Each of the others can be read alone.
"""

from miniddp.ddp import MiniDDP

__all__ = ["MiniDDP"]
