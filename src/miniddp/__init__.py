"""Data parallelism from scratch, to be read: how the gradients of many processes become one.

The core, in reading order, one idea per file; a file imports only what comes before it, and
`errors`:

=================  =============================================================================
`manual`           average the gradients by hand, after backward
`comm`             the group, and waiting for a collective
`buckets`          which parameter goes into which bucket: pure functions
`replicas`         verify that all ranks hold the same model, then broadcast one rank's values
`bucket`           one flat buffer: copy in and divide, copy out
`autograd_graph`   when a gradient arrives, and when a backward is over
`ladder`           five strategies, from one all-reduce per parameter to overlapped buckets
`nested`           the tensors in nested inputs and outputs
`unused`           parameters that a backward leaves out
`reducer`          the bucketed, overlapped reducer and its states
`ddp`              `MiniDDP`: the wrapper, with the everyday keywords
`errors`           the longer messages of the core
=================  =============================================================================

Beside the core, three files that stand alone:

=================  =============================================================================
`losses`           which loss each rank back-propagates: the one equation
`sync_batch_norm`  batch normalization over the batch of all ranks
`data_parallel`    `MiniDataParallel`: one process, several replicas, summed gradients
=================  =============================================================================

The rooms. They import these files, never the reverse:

=================  =============================================================================
`collectives`      all-reduce from send and receive; collectives with a gradient
`extras`           comm hooks, the bucket planner, local SGD and DiLoCo
`sharded`          the same average in pieces: ZeRO-1, ZeRO-2, `fully_shard`, Muon
`torch_drop_in`    `DistributedDataParallel`: torch's class name, every keyword, its speed
=================  =============================================================================
"""

from miniddp.ddp import MiniDDP

__all__ = ["MiniDDP"]

__version__ = "0.1.0"
