"""The reducer behind `DistributedDataParallel`, with the features and names of torch's reducer.

`TorchReducer` adds to the core's reducer what the rare keywords need: sparse gradients, skipped
buckets, and gradients kept by distributed autograd (RPC). It can divide by the number of ranks that
still have inputs, and it records the times that `_get_ddp_logging_data` reports.

The last methods have the names of `torch.distributed.Reducer`.

Source: torch/csrc/distributed/c10d/{reducer,logger}.cpp.
"""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from miniddp import errors
from miniddp.bucket import Bucket
from miniddp.buckets import ParameterSize
from miniddp.comm import wait_for
from miniddp.extras.grad_bucket import GradBucket
from miniddp.reducer import ReducerState, wait_for_future
from miniddp.torch_drop_in.sparse import SparseBucket, each_alone
from miniddp.torch_drop_in.static_graph import StaticGraphReducer

CommHook = Callable[[Any, GradBucket], Future]


class TorchReducer(StaticGraphReducer):
    """The core's reducer with torch's rare features.

    Args (beyond those of `miniddp.reducer.Reducer`):
        sparse: whether each parameter's gradient is a sparse tensor.
        skip_unused: send no bucket that holds only unused parameters. Every rank must then have
            the same unused parameters.
    """

    advice = errors.Advice(
        unfinished=" With strict=True, such a step itself raises an error that lists what each "
        "rank lacks. (For torch's own DDP, set the environment variable TORCH_DISTRIBUTED_DEBUG to "
        "either INFO or DETAIL.)",
        marked_twice=" If the model uses activation checkpointing, static_graph=True may help, "
        "too.",
        unexpected=" Or keep the embedding's gradient sparse in every use: sparse gradients are "
        "averaged, too.",
    )

    def __init__(
        self, *args: Any, sparse: Sequence[bool], skip_unused: bool = False, **keywords: Any
    ):
        self.sparse, self.skip_unused = list(sparse), skip_unused
        self.comm_hook: tuple[CommHook, Any] | None = None
        self.last_error: str | None = None
        self.times: dict[str, int] = {}
        self.reduced_buckets = 0
        self.participants: dist.Work | None = None
        self.extra_futures: list[Future] = []
        self.rpc_context: int | None = None
        self.checked = False  # by `strict`, in this backward
        self.same_unused_so_far = True
        self.searched: list[int] | None = None
        super().__init__(*args, **keywords)

    def sizes(self) -> list[ParameterSize]:
        return each_alone(super().sizes(), self.sparse)

    def make_bucket(self, indices: list[int]) -> Bucket:
        if self.sparse[indices[0]]:
            return SparseBucket(indices, [self.parameters[indices[0]]])
        return super().make_bucket(indices)

    def error(self, message: str, kind: type[Exception] = RuntimeError) -> Exception:
        self.last_error = message
        return kind(message)

    def unexpected_gradients(self, bucket: Bucket, indices: Sequence[int]) -> Exception:
        if not isinstance(bucket, SparseBucket):
            return super().unexpected_gradients(bucket, indices)
        names = [self.names[index] for index in indices]
        message = errors.unexpected_gradients(self.rank, names, layout="sparse")
        return self.error(message + self.advice.unexpected)

    def expects_gradients(self) -> bool:
        """Whether a backward has been announced, or is being reduced."""
        return self.state in (ReducerState.READY, ReducerState.REDUCING)

    # The phases, with what each adds -------------------------------------------------------------

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Lightning and Accelerate call this too, for a forward that ran under `no_sync()`."""
        super().prepare_for_backward(outputs)
        self.checked = False
        self.rpc_context = self._find_rpc_context()
        searched = self.find_unused_parameters or self.static_graph
        # Distributed autograd runs a device's gradients in several threads: they take the lock.
        self.lock_free = self.on_cpu and not searched and self.rpc_context is None
        self.times["backward_start"] = perf_counter_ns()
        if self.find_unused_parameters:
            unreachable = self.usage.unreachable
            self.same_unused_so_far &= self.searched in (None, unreachable)
            self.searched = unreachable

    def expect_autograd_hook(self, index: int) -> bool:
        if self.rpc_context is not None:
            self._borrow_gradient(index)
        return super().expect_autograd_hook(index)

    def divisor(self) -> int:
        return 1 if self.comm_hook else self.contributors()

    def contributors(self) -> int:
        """W; with Join's `divide_by_initial_world_size=False`, the ranks that still have inputs."""
        if self.participants is None:
            return self.process_group.size()
        wait_for(self.participants)
        [count] = self.participants.get_future().value()
        return int(count.item())

    def all_reduce_bucket(self, bucket: Bucket) -> None:
        if self.next_bucket == 0:
            self.times["comm_start"] = perf_counter_ns()
            self.reduced_buckets = 0
        if not self._skips(bucket):
            count = len(self.buckets)
            while self._skips(self.buckets[count - 1]):
                count -= 1
            bucket.launched = True
            bucket.future = self.run_comm_hook(GradBucket(bucket, self.next_bucket, count))
            self.reduced_buckets += 1

    def run_comm_hook(self, bucket: GradBucket) -> Future:
        """Start the registered comm hook, or else the all-reduce, of one bucket."""
        if self.comm_hook is None:
            return self._run_allreduce_hook(bucket)
        hook, state = self.comm_hook
        future = hook(state, bucket)
        if isinstance(future, dist.Work) or not hasattr(future, "wait"):
            raise self.error(
                f"callback must return a torch.futures.Future object, but got {type(future)}; wrap "
                "a finished result with Future.set_result, and of a Work return its get_future()"
            )
        return future

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future:
        """The sum over all ranks, in place; the future's value is a list of the bucket's buffer."""
        work = dist.all_reduce(bucket.buffer(), group=self.process_group, async_op=True)
        return work.get_future()

    def _skips(self, bucket: Bucket) -> bool:
        return self.skip_unused and set(bucket.indices) <= set(self.usage.unreachable)

    def wait_for_bucket(self, bucket: Bucket) -> None:
        # The value of a collective's future is a list; that of a hook's is a list or a tensor.
        result = wait_for_future(bucket.future, bucket.buffer)
        result = result[0] if isinstance(result, list | tuple) else result
        if not isinstance(result, Tensor):
            raise self.error(
                "the future that a comm hook returns must hold a tensor of the bucket's size, but "
                f"it holds {type(result)}"
            )
        if bucket.buffer.is_complex() and not result.is_complex():
            result = torch.view_as_complex(result)  # collectives may work on pairs of reals
        sparse = isinstance(bucket, SparseBucket)
        if result.numel() != bucket.buffer.numel() and not sparse:
            raise self.error(
                f"the comm hook's result has {result.numel()} elements, but the bucket has "
                f"{bucket.buffer.numel()}"
            )
        if sparse or result.data_ptr() != bucket.buffer.data_ptr():
            bucket.buffer.copy_(result)

    def finalize_backward(self) -> None:
        with self.lock:
            self.times["compute_end"] = perf_counter_ns()
            extra_futures, self.extra_futures = self.extra_futures, []
            super().finalize_backward()
            for future in extra_futures:
                wait_for_future(future, self.parameters[0])
            if self.rpc_context is not None:
                self._return_gradients()
            self.times["comm_end"] = perf_counter_ns()

    # Distributed autograd (RPC) keeps gradients in a context of its own, not in `.grad`. They are
    # put into `.grad` for the time of the reduction.

    def _find_rpc_context(self) -> int | None:
        if not dist.rpc.is_available() or not dist.rpc.api._is_current_rpc_agent_set():
            return None
        self.borrowed: dict[int, tuple[Tensor, Tensor | None]] = {}
        try:  # there is no public way to ask
            return torch._C._distributed_autograd._current_context()._context_id()
        except RuntimeError:
            return None

    def _borrow_gradient(self, index: int) -> None:
        parameter = self.parameters[index]
        gradient = dist.autograd.get_gradients(self.rpc_context).get(parameter)
        if gradient is not None and index not in self.borrowed:
            self.borrowed[index] = (gradient, parameter.grad)
            parameter.grad = gradient

    def _return_gradients(self) -> None:
        for index, (gradient, before) in self.borrowed.items():
            parameter = self.parameters[index]
            if parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = before
        self.rpc_context = None

    # The names that torch's tests and optimizers, Accelerate, and Lightning call ------------------

    def _rebuild_buckets(self) -> bool:
        return self.rebuild_buckets()

    def _delay_all_reduce(self) -> None:
        self.learn_graph()

    def _get_local_used_map(self) -> Tensor:
        return self.usage.counts

    def _ddp_graph_static(self) -> bool:
        return self.same_unused_so_far
