"""The bucketed, overlapped reducer: what becomes of a gradient between backward and optimizer step.

One reducer serves one module on one rank. Its phases, numbered again in the code:

1. *Build.* Parameters are laid into buckets (`miniddp.buckets`), each a flat buffer with one view
   for each parameter. A hook waits on every parameter's gradient accumulator.
2. *Arm.* A forward announces that the backward to come is to be reduced. Parameters that this
   backward cannot reach are found by a walk over the graph.
3. *Collect.* A gradient arrives, is divided by the world size W while it is copied into its bucket,
   and is counted.
4. *Launch.* A full bucket is all-reduced while backward goes on, but strictly in the order of the
   plan. A bucket whose turn has not come waits: gradients may arrive in another order on another
   rank, and collectives match by order alone.
5. *Finalize.* Once per backward, at its very end: wait for each all-reduce, copy the averages back.
6. *Rebuild.* Before the second forward the buckets are packed anew, in the order in which gradients
   arrived on rank 0; and once more by the clock, if that is asked for (`miniddp.extras.first_steps`).

Cost for each backward: one all-reduce a bucket, 2 (W-1)/W times the gradients' bytes sent by each
rank on a ring; one more of 4 bytes a parameter if unused parameters are looked for. Memory: one
buffer as large as the gradients; none beyond the gradients themselves with
`gradient_as_bucket_view`.

Follows torch/csrc/distributed/c10d/reducer.cpp, bit by bit where arithmetic is concerned, and Li et
al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from miniddp import errors as reducer_errors
from miniddp.autograd_graph import at_end_of_backward, gradient_accumulator, reachable_from
from miniddp.bucket import Bucket, GradBucket, Run, first_tensor
from miniddp.buckets import (
    NO_CAP,
    LinkCost,
    Plan,
    arrival_plan,
    initial_plan,
    measured_plan,
    sizes_of,
)
from miniddp.replicas import plan_of_rank_0, wait_for
from miniddp.torch_drop_in import ReducerNames

CommHook = Callable[[Any, GradBucket], Future]


class Reducer(ReducerNames):
    """Averages the gradients of `parameters` over `process_group` while backward runs.

    Args:
        parameters: those that require a gradient, each once, in the same order on every rank.
        names: their names, for errors.
        process_group: the ranks that average.
        caps: the buckets' caps in bytes (`miniddp.buckets.bucket_caps`).
        sparse: for each parameter, whether its gradient is a sparse tensor.
        find_unused_parameters: walk the graph after each forward; a parameter that no rank used
            keeps its gradient as it was.
        gradient_as_bucket_view: let gradients be views of the buckets, which saves a copy of them.
        plan_at_once: apply the caps from the first backward on. Otherwise it has one bucket for
            each dtype and device, and the caps hold from the second on.
        skip_unused: send no bucket that holds unused parameters only; they must then be the same
            parameters on every rank.
    """

    # 1. Build -------------------------------------------------------------------------------------

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        process_group: dist.ProcessGroup,
        *,
        caps: Sequence[int],
        sparse: Sequence[bool],
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        plan_at_once: bool = False,
        skip_unused: bool = False,
    ):
        self.parameters, self.names = list(parameters), list(names)
        self.process_group = process_group
        self.caps, self.sparse = tuple(caps), list(sparse)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_unused = skip_unused
        self.static_graph = False
        self.looks_for_unused = find_unused_parameters
        self.rpc_context: int | None = None
        self.learns_graph = False
        self.comm_hook: tuple[CommHook, Any] | None = None
        self.device = self.parameters[0].device
        self.on_cuda = self.device.type == "cuda"
        self.lock = threading.RLock()  # autograd runs one thread for each GPU

        self.armed = False
        self.unfinished = False
        self.strayed = False
        self.accumulates_locally = False
        self.rebuilt = False
        self.takes_all = False
        self.reduced_buckets = 0
        self.divisor: int | None = None
        self.participants: dist.Work | None = None
        self.optimizer_in_backward = False
        self.extra_futures: list[Future] = []
        self.times: dict[str, int] = {}
        self.unused: list[int] = []
        self.searched = False
        self.same_unused_so_far = True
        self.used = [0] * len(self.parameters)
        self.used_anywhere: Tensor | None = None
        self.firings = [0] * len(self.parameters)  # gradients a backward, in a static graph
        self._build(initial_plan(self._sizes(), self.caps if plan_at_once else NO_CAP))
        self._rewind()
        self._hook_accumulators()

    def _sizes(self) -> list:
        return sizes_of(self.parameters, self.sparse)

    def _build(self, plan: Plan) -> None:
        self.buckets: list[Bucket] = []  # frees the old buffers before the new ones are made
        self.run_of: dict[int, Run] = {}
        for indices in plan:
            parameters = [self.parameters[index] for index in indices]
            bucket = Bucket(indices, parameters, self.sparse[indices[0]])
            self.buckets.append(bucket)
            for run in bucket.runs:
                self.run_of |= dict.fromkeys(run.indices, run)
            if self.gradient_as_bucket_view and not bucket.sparse:
                for parameter, view in zip(parameters, bucket.views, strict=True):
                    if parameter.grad is not None:
                        parameter.grad = view.copy_(parameter.grad)

    def _hook_accumulators(self) -> None:
        self.accumulators = [gradient_accumulator(parameter) for parameter in self.parameters]
        this = weakref.ref(self)
        for node in self.accumulators:
            # If another reducer waits on the same module, it may not reduce what this one will.
            previous = node.metadata.get("miniddp.reducer", lambda: None)()
            if previous not in (None, self):
                previous.armed = previous.takes_all = False
            node.metadata["miniddp.reducer"] = this
        handles = [
            node.register_hook(_hook_for(this, index))
            for index, node in enumerate(self.accumulators)
        ]
        self.remove_hooks = weakref.finalize(self, lambda: [handle.remove() for handle in handles])
        self.remove_hooks.atexit = False

    def hook_again(self) -> None:
        """The parameters' data have changed their type, and so their accumulators."""
        self.remove_hooks()
        self._hook_accumulators()

    # 2. Arm ---------------------------------------------------------------------------------------

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Reduce the next backward. `outputs`: what the forward returned, if unused ones count."""
        self.armed = True
        self.rpc_context = self.find_rpc_context()
        self.times["backward_start"] = perf_counter_ns()
        self._rewind()
        if self.looks_for_unused:
            with torch.profiler.record_function("miniddp.search_unused_parameters"):
                reachable = reachable_from(outputs)
            unused = [i for i, n in enumerate(self.accumulators) if n not in reachable]
            self.same_unused_so_far &= unused == self.unused or not self.searched
            self.unused, self.searched = unused, True

    def _rewind(self) -> None:
        self.order: list[int] = []
        self.takes_all = False
        self.next_bucket = 0
        if self.learns_graph:  # an interrupted backward taught nothing
            self.firings = [0] * len(self.parameters)
        self.pending_firings = list(self.firings)
        for bucket in self.buckets:
            bucket.rewind()

    def expect_static_graph(self) -> None:
        """From now on the graph is the same in each iteration; the next backward shows it."""
        self.static_graph = True
        self.looks_for_unused = False
        self.learns_graph = True

    # 3. Collect -----------------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """The gradient of parameter `index` is accumulated, or backward found it undefined."""
        with self.lock:
            if self._takes(index):
                self.order.append(index)
                self._mark_ready(index)

    def _takes(self, index: int) -> bool:
        """Whether the gradient that has arrived is the one its bucket waits for."""
        if self.rpc_context is not None:
            self.borrow_gradient(index)
        # Also without synchronization: a parameter used once in a window counts as used.
        if self.looks_for_unused or self.learns_graph:
            self._note_used(index)
        if not self.armed:
            self._note_stray(index)
            return False
        if self.learns_graph:
            self.firings[index] += 1
            return False
        if not self.unfinished:
            self._begin()
        if self.static_graph:
            self.pending_firings[index] -= 1
            if self.pending_firings[index] < 0:
                raise self.error(reducer_errors.graph_changed(self, index))
            return self.pending_firings[index] == 0
        return True

    def _note_stray(self, index: int) -> None:
        if self.accumulates_locally:
            return
        self.strayed = True
        if self.static_graph and not self.learns_graph and self.firings[index] == 0:
            raise self.error(reducer_errors.graph_changed(self, index))

    def _note_used(self, index: int) -> None:
        if self.parameters[index].grad is not None:
            self.used[index] = 1

    def _begin(self) -> None:
        """At the first gradient of a backward."""
        self.unfinished = True
        self.takes_all = not (self.static_graph or self.on_cuda or self.rpc_context is not None)
        self.divisor = None if self.comm_hook else self.contributors()
        for index in self.unused:
            self._mark_ready(index)

    def contributors(self) -> int:
        """W; or, if asked for, the number of ranks that still have inputs."""
        if self.participants is None:
            return self.process_group.size()
        wait_for(self.participants)
        return int(first_tensor(self.participants.get_future().value()).item())

    def _mark_ready(self, index: int) -> None:
        run = self.run_of[index]
        if index not in run.missing:
            raise self.error(reducer_errors.marked_twice(self, index))
        run.missing.remove(index)
        bucket = run.bucket()
        if self.on_cuda:
            bucket.note_stream()
        if run.missing:
            return
        bucket.wait_for_streams()
        if not bucket.sparse:
            try:
                run.copy_in(self.divisor, self.gradient_as_bucket_view)
            except RuntimeError:  # asked only now: a look at each gradient takes time
                if sparse := run.sparse_gradients():
                    raise self.error(reducer_errors.not_dense(self, sparse)) from None
                raise
        elif not bucket.take_sparse(self.divisor):
            raise self.error(reducer_errors.not_sparse(self, index))
        bucket.missing_runs -= 1
        if bucket.missing_runs == 0:
            self._launch_full_buckets()

    def complete_with_zeros(self) -> None:
        """Let every gradient that has not arrived count as zeros, so that no rank waits for it."""
        if not self.unfinished:
            self._begin()
        for index in self.absent():
            self._mark_ready(index)

    def absent(self) -> list[int]:
        """The parameters whose gradients have not arrived."""
        return sorted(i for bucket in self.buckets for run in bucket.runs for i in run.missing)

    def learn_graph(self) -> None:
        """At the end of a static graph's first backward: note what came how often; reduce all."""
        # Done already: several forwards, one backward. Or a pass of autograd.grad: not yet.
        if not self.learns_graph or not any(self.firings):
            return
        self.learns_graph = False
        self.unused = [index for index, count in enumerate(self.firings) if count == 0]
        self.unfinished = True
        self._reduce_used()
        self.divisor = None if self.comm_hook else self.contributors()
        for index in range(len(self.parameters)):
            self._mark_ready(index)

    # 4. Launch ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _launch_full_buckets(self) -> None:
        while self.next_bucket < len(self.buckets):
            bucket = self.buckets[self.next_bucket]
            if bucket.missing_runs:
                return
            bucket.wait_for_streams()
            if self.next_bucket == 0:
                self.times["comm_start"] = perf_counter_ns()
                self.reduced_buckets = 0
            if not self.skips(bucket):
                handle = GradBucket(bucket, self.next_bucket, self.launched_until())
                bucket.future = self.reduce(handle)
                self.reduced_buckets += 1
            self.next_bucket += 1
        if self.looks_for_unused:
            self._reduce_used()
        at_end_of_backward(self.finalize)

    def reduce(self, bucket: GradBucket) -> Future:
        """Start the all-reduce, or the comm hook, of one bucket."""
        if self.comm_hook is None:
            return self.all_reduce(bucket)
        hook, state = self.comm_hook
        future = hook(state, bucket)
        if not hasattr(future, "wait"):
            raise self.error(reducer_errors.not_a_future(future))
        return future

    def all_reduce(self, bucket: GradBucket) -> Future:
        """The sum over all ranks, in place; the future's value holds the bucket's buffer."""
        work = dist.all_reduce(bucket.buffer(), group=self.process_group, async_op=True)
        return work.get_future()

    def _reduce_used(self) -> None:
        for index in self.order:
            self._note_used(index)
        self.used_anywhere = torch.tensor(self.used, dtype=torch.int32, device=self.device)
        self.used_work = dist.all_reduce(
            self.used_anywhere, group=self.process_group, async_op=True
        )
        self.used_nowhere: list[bool] | None = None

    # 5. Finalize ----------------------------------------------------------------------------------

    @torch.no_grad()
    def finalize(self) -> None:
        with self.lock:
            if not self.armed:  # a strict backward has done it already
                return
            self.times["compute_end"] = perf_counter_ns()
            # Now, so that a comm hook whose future fails does not spoil the steps that follow.
            self.armed = self.unfinished = self.takes_all = False
            used, self.used = self.used, [0] * len(self.used)
            extra_futures, self.extra_futures = self.extra_futures, []
            may_be_unused = self.looks_for_unused or self.static_graph
            for bucket in self.buckets:
                if bucket.future is None:
                    continue
                result = first_tensor(bucket.future.wait())
                if self.on_cuda:
                    bucket.wait_for_default_stream()
                bucket.future = None
                # Zeros for an unused gradient would make an optimizer move its parameter.
                wanted = None
                if may_be_unused:
                    wanted = [
                        slot
                        for slot, index in enumerate(bucket.indices)
                        if used[index] or not self._unused_everywhere(index)
                    ]
                alias = self.gradient_as_bucket_view
                replaced = bucket.copy_out(result, wanted, alias, not self.optimizer_in_backward)
                if replaced:
                    raise self.error(reducer_errors.not_a_view(self, bucket.indices[replaced[0]]))
            for future in extra_futures:
                future.wait()
            if self.looks_for_unused:
                wait_for(self.used_work)
            if self.rpc_context is not None:
                self.return_gradients()
            self.times["comm_end"] = perf_counter_ns()

    def _unused_everywhere(self, index: int) -> bool:
        """Whether no rank used the parameter; waits for their answers when first needed."""
        if self.used_nowhere is None:
            wait_for(self.used_work)
            self.used_nowhere = [count == 0 for count in self.used_anywhere.tolist()]
        return self.used_nowhere[index]

    # 6. Rebuild -----------------------------------------------------------------------------------

    def rebuild(self) -> bool:
        """Before a forward: pack the buckets by order of arrival, once; True if it was now.

        Raises:
            RuntimeError: the backward before this forward did not produce all gradients.
        """
        self.check_finished()
        if self.rebuilt or self.looks_for_unused or not self.order:
            return False
        arrived = set(self.order)
        order = self.order + [index for index in self.unused if index not in arrived]
        self._adopt(arrival_plan(self._sizes(), order, self.caps))
        return True

    def pack_by(self, steps: Sequence[Sequence[float]], link: LinkCost) -> None:
        """Between two steps: pack the buckets anew, by `measured_plan`. Every rank has to call."""
        self._adopt(measured_plan(self._sizes(), steps, link, self.caps))

    def _adopt(self, plan: Plan) -> None:
        self._build(plan_of_rank_0(plan, self.process_group, self.device))
        self.rebuilt = True
        self._rewind()

    def start_over(self) -> None:
        """Forget a backward that was interrupted, and the order of arrival; rebuild once more."""
        self.armed = self.unfinished = self.rebuilt = False
        self._rewind()

    def check_finished(self) -> None:
        """Raise RuntimeError if a backward has begun to reduce and some gradients never came."""
        if self.unfinished:
            raise self.error(reducer_errors.unfinished(self))


def _hook_for(this: weakref.ref[Reducer], index: int) -> Callable[..., None]:
    """What autograd calls for each parameter in each backward: `on_gradient`, and its short cut.

    A backward calls hundreds of these, so the common case, one thread that takes all that arrives,
    costs one Python frame.
    """

    def hook(gradients: Any, nothing: Any) -> None:
        reducer = this()  # the hook does not keep its reducer alive
        if reducer is None:
            return
        if not reducer.takes_all:
            reducer.on_gradient(index)
            return
        reducer.order.append(index)
        missing = reducer.run_of[index].missing
        if len(missing) > 1 and index in missing:
            missing.remove(index)
        else:
            reducer._mark_ready(index)

    return hook
