"""A replacement for torch's DistributedDataParallel: change one import line.

    from miniddp.torch_drop_in import DistributedDataParallel as DDP

The class takes every keyword of torch 2.11 to 2.15, and one of its own: `strict`.
It has the private names that torch's tests, Lightning, Accelerate, and Transformers call.

===================  ============================================================================
`wrapper`            `DistributedDataParallel(MiniDDP)`: the keywords, comm hooks, copies
`buffers`            buffer hooks; from which rank buffers are taken
`delayed`            parameters that are reduced late
`torch_reducer`      `TorchReducer`: comm hooks, skipped buckets, RPC, times, torch's names
`fast`               `FastReducer`: parts of a bucket, copied in one call; hooks without a lock
`static_graph`       `StaticGraphReducer`: every iteration uses the same parameters
`sparse`             the bucket of a sparse gradient
`join`, `strict`     ranks that run out of data; errors in the faulty step, on every rank
`mixed_precision`    compute in low precision, step in full precision
`keywords`, `log`    the rare keywords as functions; what `_get_ddp_logging_data` returns
===================  ============================================================================

The reducers are one chain: TorchReducer → StaticGraphReducer → FastReducer → the core's Reducer.
A method that overrides one of the core calls `super()` where it extends it.

Here a gradient is divided in three files besides the core's `miniddp.bucket`: `fast`, as a part is
copied in; `sparse`; and `mixed_precision`, before the sum. With a comm hook, the hook divides.
"""

from miniddp.torch_drop_in.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
