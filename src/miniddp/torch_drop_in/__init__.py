"""A replacement for torch's DistributedDataParallel: change one import line.

    from miniddp.torch_drop_in import DistributedDataParallel as DDP

The class takes every keyword of torch 2.11 to 2.15, and two of its own: `strict` and `bucket_plan`.
It has the private names that torch's tests, Lightning, Accelerate, and Transformers call.

=============  ==================================================================================
`wrapper`      `DistributedDataParallel(MiniDDP)`: the keywords, Join, copies, buffer hooks
`reducer`      `TorchReducer(Reducer)`: sparse gradients, skipped buckets, RPC, times
`keywords`     what the rare keywords mean, as functions
`log`          the dictionary that `_get_ddp_logging_data` returns
=============  ==================================================================================
"""

from miniddp.torch_drop_in.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
