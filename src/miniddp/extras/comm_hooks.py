"""Comm hooks: what communicates a bucket instead of the plain all-reduce.

A hook is called as `hook(state, bucket)` when a bucket's turn has come, in launch order. It returns
a Future of the gradients to use: one flat tensor as long as `bucket.buffer()`. The bucket's
gradients are local and *not* divided; the hook has to average them. Register it with
`register_comm_hook(state, hook)` on `miniddp.torch_drop_in.DistributedDataParallel` or on torch's
wrapper. `state` is the process group (None for the default one), and for the hierarchical average a
`HierarchicalState`.

================================  =======================================  =======================
hook                              bytes sent per byte of float32           the result
================================  =======================================  =======================
`average`                         1                                        exact
`total`                           1                                        W times the average
`hierarchical_average`            1, fewer of them between nodes           exact
`fp16_compress`, `bf16_compress`  1/2                                      11, 8 significant bits
================================  =======================================  =======================

Torch has others, such as PowerSGD. Source: torch/distributed/algorithms/ddp_comm_hooks.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from miniddp.collectives import Nodes, hierarchical_all_reduce


def average(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean over the ranks: what the wrapper computes without a hook, up to rounding.

    Divides before the sum, so that a sum of W large gradients cannot overflow.
    """
    return _sum(bucket.buffer().div_(dist.get_world_size(state)), state)


def total(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The sum over the ranks, for losses whose denominator is global already."""
    return _sum(bucket.buffer(), state)


class HierarchicalState:
    """The nodes, and one thread that averages bucket after bucket while backward goes on.

    The steps of an average wait for each other, so they need a thread. One thread and private
    groups serve all buckets, so every rank sends in launch order.

    Args:
        ranks_per_node: L. Every rank of the world has to make a state.

    Raises ValueError if the world is not made of whole nodes. Costs a thread, until `close` or the
    end of the state.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self.nodes = Nodes.groups(ranks_per_node)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hierarchical average")

    def close(self) -> None:
        """End the thread, once what is under way is done; before the groups are destroyed."""
        self.thread.shutdown()


def hierarchical_average(state: HierarchicalState, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean, by `collectives.hierarchical_all_reduce`: the least traffic between nodes.

    For CPU gradients on gloo, whose own all-reduce is a flat ring. Raises NotImplementedError for
    others: NCCL knows the machine's links, and chooses between such ways by itself.
    """
    buffer = bucket.buffer()
    if buffer.device.type != "cpu":
        raise NotImplementedError(
            f"the bucket is on {buffer.device}, and this hook is for the CPU: use "
            "comm_hooks.average, and NCCL picks the route itself"
        )
    done: Future[Exception | None] = Future()

    def average_and_tell() -> None:
        try:
            hierarchical_all_reduce(buffer, dist.ReduceOp.AVG, nodes=state.nodes)
            done.set_result(None)
        except Exception as error:
            done.set_result(error)

    def result(done: Future[Exception | None]) -> Tensor:
        # Raised here: torch's C++ would take an exception set as the result for a value.
        if (error := done.value()) is not None:
            raise error
        return buffer

    state.thread.submit(average_and_tell)
    return done.then(result)


def fp16_compress(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean, sent as float16: half the bytes; gradients above 65,504 overflow.

    Raises TypeError for complex gradients, of which only the real part would be sent.
    """
    return _compressed_average(torch.float16, state, bucket)


def bf16_compress(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean, sent as bfloat16: half the bytes, the range of float32, two to three digits.

    Raises TypeError for complex gradients, of which only the real part would be sent.
    """
    return _compressed_average(torch.bfloat16, state, bucket)


def _sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Future[Tensor]:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _compressed_average(
    dtype: torch.dtype, group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> Future[Tensor]:
    buffer = bucket.buffer()
    if buffer.is_complex():
        raise TypeError(
            f"bucket {bucket.index()} holds {buffer.dtype} gradients, and {dtype} has no imaginary "
            "part: use the hook `average`"
        )
    compressed = buffer.to(dtype).div_(dist.get_world_size(group))
    return _sum(compressed, group).then(lambda done: buffer.copy_(done.value()))
