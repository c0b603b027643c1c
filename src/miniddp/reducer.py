"""The bucketed, overlapped reducer: what happens to gradients between backward and optimizer step.

One reducer serves one module on one rank. Its phases, numbered again in the code:

1. *Build.* Assign parameters to buckets and hook each parameter's gradient accumulator.
2. *Prepare.* A forward announces that the next backward is reduced.
3. *Collect.* Gradients arrive, and each bucket counts those that it still waits for.
4. *Launch.* All-reduce each full bucket while backward goes on, strictly in bucket order: gradients
   may arrive in another order on another rank, and collectives are matched by their order alone.
   `Bucket.copy_in` divides the gradients by the world size W as it copies them.
5. *Finalize.* Once per backward, at its end: wait for each all-reduce and copy the averages out.
6. *Rebuild.* Once, before the first forward with grad after a reduced backward: use the plan that
   rank 0 packs in its order of arrival and broadcasts. Not with `find_unused_parameters`.

`ReducerState` says in which phase it is. A profile shows the ranges miniddp.copy_in, .launch,
.wait, .copy_out, and .rebuild: one per bucket and backward, and one for the rebuild.

Cost per backward: one all-reduce per bucket; on a ring, each rank sends 2(W−1)/W bytes per byte of
gradient. Memory: a second copy of the gradients; none with `gradient_as_bucket_view`.

Source: torch/csrc/distributed/c10d/reducer.cpp, whose names and arithmetic this file follows; Li et
al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

import threading
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.profiler import record_function

from miniddp import errors
from miniddp.autograd_graph import at_end_of_backward, hook_accumulators
from miniddp.bucket import Bucket
from miniddp.buckets import NO_CAP, ParameterSize, Plan, arrival_plan, initial_plan, sizes_of
from miniddp.comm import wait_for
from miniddp.unused import UsedParameters


class ReducerState(Enum):
    """The phase that a reducer is in. `_NEXT` lists what `enter` allows."""

    # No backward is expected. If one runs, its gradients stay local, and the next forward warns.
    IDLE = auto()
    # `no_sync()` was entered: gradients accumulate on this rank, without a warning.
    LOCAL = auto()
    # A forward has announced a backward that will be reduced; no gradient has arrived.
    READY = auto()
    # Gradients arrive, and full buckets are launched.
    REDUCING = auto()
    # Backward has ended: the averages are awaited. `state_between_backwards` follows.
    FINALIZING = auto()


_NEXT = {
    ReducerState.IDLE: {ReducerState.LOCAL, ReducerState.READY},
    ReducerState.LOCAL: {ReducerState.READY},
    # A forward may be followed by another one instead of by its backward.
    ReducerState.READY: {ReducerState.READY, ReducerState.REDUCING},
    ReducerState.REDUCING: {ReducerState.FINALIZING},
    ReducerState.FINALIZING: {ReducerState.IDLE, ReducerState.LOCAL},
}


class Reducer:
    """Averages the gradients of `parameters` over `process_group` while backward runs.

    Args:
        parameters, names: the trainable parameters and their names, ordered alike on every rank.
        process_group, find_unused_parameters, gradient_as_bucket_view: as in `miniddp.ddp`.
        caps: the buckets' caps in bytes (`miniddp.buckets.bucket_caps`).
        plan_at_once: apply the caps from the first backward on. Otherwise it uses one bucket per
            dtype and device, because the order of the gradients is not yet known.
    """

    advice = errors.Advice()

    # 1. Build -------------------------------------------------------------------------------------

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        process_group: dist.ProcessGroup,
        *,
        caps: Sequence[int],
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        plan_at_once: bool = False,
    ):
        self.parameters, self.names = list(parameters), list(names)
        self.process_group, self.rank = process_group, process_group.rank()
        self.caps, self.device = tuple(caps), self.parameters[0].device
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        # On GPUs, autograd runs the hooks of a backward in several threads.
        self.lock = threading.RLock()

        self.state = self.state_between_backwards = ReducerState.IDLE
        self.has_rebuilt_bucket = False
        self.unsynchronized = False  # whether gradients arrived that no forward had announced
        self.usage = UsedParameters(self.parameters, process_group)
        self.initialize_buckets(initial_plan(self.sizes(), self.caps if plan_at_once else NO_CAP))
        self.hook_accumulators()

    def sizes(self) -> list[ParameterSize]:
        """What packing needs to know of the parameters."""
        return sizes_of(self.parameters)

    def make_bucket(self, indices: list[int]) -> Bucket:
        """The bucket of the parameters with these indices."""
        parameters = [self.parameters[index] for index in indices]
        return Bucket(indices, parameters, self.gradient_as_bucket_view)

    def initialize_buckets(self, plan: Plan) -> None:
        """Allocate the buckets of `plan`; existing gradients become views of them, if asked for."""
        # Empty all first: old buffers that nothing uses are then freed before new ones are made.
        self.buckets: list[Bucket] = []
        self.variable_locators: dict[int, Bucket] = {}
        self.expected: dict[int, Bucket] = {}
        for indices in plan:
            bucket = self.make_bucket(indices)
            self.buckets.append(bucket)
            self.variable_locators |= dict.fromkeys(indices, bucket)
            if self.gradient_as_bucket_view:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=False):
                    if parameter.grad is not None:
                        parameter.grad = view.copy_(parameter.grad)
        self.reset_bucket_counting()

    def hook_accumulators(self) -> None:
        """Hook each accumulator. If the parameters' dtype changes, a subclass calls it again."""
        self.accumulators, self.remove_hooks = hook_accumulators(self, self.parameters)

    # 2. Prepare -----------------------------------------------------------------------------------

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Announce a reduced backward that starts at `outputs`."""
        self.enter(ReducerState.READY)
        self.state_between_backwards = ReducerState.IDLE
        self.reset_bucket_counting()
        if self.find_unused_parameters:
            self.usage.search(self.accumulators, outputs)

    def prepare_for_local_backward(self) -> None:
        """Keep the next backward local, unless an earlier forward has announced a reduction."""
        self.state_between_backwards = ReducerState.LOCAL
        if self.state is ReducerState.IDLE:
            self.enter(ReducerState.LOCAL)

    def reset_bucket_counting(self) -> None:
        """Expect every gradient once more."""
        self.expected = dict(self.variable_locators)  # those whose gradient has not arrived
        self.order: list[int] = []  # the indices of the gradients, as they arrived
        self.next_bucket = 0
        for bucket in self.buckets:
            bucket.reset()

    def reset_state(self) -> None:
        """From any state to IDLE: forget a backward that failed or that another reducer handles."""
        self.state = self.state_between_backwards = ReducerState.IDLE
        self.reset_bucket_counting()

    def enter(self, state: ReducerState) -> None:
        """Change the state. Raises RuntimeError if `_NEXT` does not allow it."""
        if state not in _NEXT[self.state]:
            raise self.error(
                f"the reducer is {self.state.name} and cannot become {state.name}. If a backward "
                "raised an exception, construct a new wrapper on every rank to go on."
            )
        self.state = state

    # 3. Collect -----------------------------------------------------------------------------------

    def autograd_hook(self, index: int) -> None:
        """Autograd calls this: gradient `index` is in `.grad`, or backward found it undefined."""
        with self.lock:
            if self.expect_autograd_hook(index):
                self.order.append(index)
                self.mark_variable_ready(index)

    def expect_autograd_hook(self, index: int) -> bool:
        """Mark the parameter as used, and enter REDUCING on the first gradient of a backward.

        Returns whether this gradient is to be reduced.
        """
        if self.find_unused_parameters:
            self.usage.mark(index)  # under no_sync too: any use counts
        if self.state is ReducerState.READY:
            self.current_divisor = self.divisor()
            self.enter(ReducerState.REDUCING)
            for unreachable in self.usage.unreachable:  # ready: no gradient will arrive
                self.mark_variable_ready(unreachable)
        elif self.state is ReducerState.IDLE:
            self.unsynchronized = True
        return self.state is ReducerState.REDUCING

    def divisor(self) -> int:
        """The number that gradients are divided by: W."""
        return self.process_group.size()

    def mark_variable_ready(self, index: int) -> None:
        """Count a gradient. With its last one, a bucket is full."""
        if (bucket := self.expected.pop(index, None)) is None:
            raise self.marked_twice(index)
        bucket.note_stream()
        bucket.pending -= 1
        if bucket.pending == 0:
            self.mark_bucket_ready()

    # 4. Launch ------------------------------------------------------------------------------------

    @torch.no_grad()  # backward(create_graph=True) runs hooks in grad mode
    def mark_bucket_ready(self) -> None:
        """Launch every full bucket whose turn has come; the last one queues `finalize_backward`."""
        while self.next_bucket < len(self.buckets):
            bucket = self.buckets[self.next_bucket]
            if bucket.pending:
                return
            bucket.wait_for_streams()
            self.copy_in(bucket)
            with record_function("miniddp.launch"):
                self.all_reduce_bucket(bucket)
            self.next_bucket += 1
        if self.find_unused_parameters:
            self.usage.all_reduce()
        at_end_of_backward(self.finalize_backward)

    def copy_in(self, bucket: Bucket) -> None:
        """Divide a bucket's gradients and copy them into its buffer."""
        if misfits := bucket.misfits():
            raise self.unexpected_gradients(bucket, misfits)
        with record_function("miniddp.copy_in"):
            bucket.copy_in(self.current_divisor)

    def all_reduce_bucket(self, bucket: Bucket) -> None:
        """Launch the sum of one bucket over all ranks."""
        work = dist.all_reduce(bucket.buffer, group=self.process_group, async_op=True)
        bucket.launched, bucket.future = True, work.get_future()

    # 5. Finalize ----------------------------------------------------------------------------------

    @torch.no_grad()
    def finalize_backward(self) -> None:
        """Wait for each all-reduce, then copy the averages out."""
        with self.lock:
            self.enter(ReducerState.FINALIZING)
            try:
                for bucket in self.buckets:
                    if bucket.launched:
                        self.finalize_bucket(bucket)
                if self.find_unused_parameters:
                    wait_for(self.usage.work)
            finally:  # after a communication error, too
                self.usage.reset()
                self.enter(self.state_between_backwards)

    def finalize_bucket(self, bucket: Bucket) -> None:
        """Wait for one bucket and copy its averages to the gradients."""
        with record_function("miniddp.wait"):
            self.wait_for_bucket(bucket)
        bucket.future = None  # its value may be a copy of the whole bucket
        with record_function("miniddp.copy_out"):
            replaced = bucket.copy_out(self.usage.slots_to_write(bucket.indices))
        if replaced:
            raise self.error(
                "Detected at least one parameter gradient is not the expected DDP bucket view with "
                f"gradient_as_bucket_view=True: {self.names[replaced[0]]}. A hook or a second "
                "wrapper set its .grad during backward: remove it, or use no views."
            )

    def wait_for_bucket(self, bucket: Bucket) -> None:
        """Wait until the bucket's buffer holds the averages."""
        assert bucket.future is not None
        wait_for_future(bucket.future, bucket.buffer)

    # 6. Rebuild -----------------------------------------------------------------------------------

    def rebuild_buckets(self) -> bool:
        """Before a forward, once: assign buckets by the order of arrival. Returns whether it did.

        Raises RuntimeError if the previous backward did not produce all gradients.
        """
        self.ensure_prior_reduction_finished()
        if self.has_rebuilt_bucket or self.find_unused_parameters or not self.order:
            return False
        order = dict.fromkeys([*self.order, *range(len(self.parameters))])
        with record_function("miniddp.rebuild"):
            self.adopt(arrival_plan(self.sizes(), list(order), self.caps))
        return True

    def adopt(self, plan: Plan) -> None:
        """Between two steps, on every rank: broadcast rank 0's plan and use it from now on."""
        self.initialize_buckets(plan_of_rank_0(plan, self.process_group, self.device))
        self.has_rebuilt_bucket = True

    def ensure_prior_reduction_finished(self) -> None:
        """Raise RuntimeError if a reduced backward lacks gradients."""
        if self.state is ReducerState.REDUCING:
            searched = self.find_unused_parameters
            message = errors.unfinished(self.rank, self.absent(), searched)
            raise self.error(message + self.advice.unfinished)

    def absent(self) -> dict[int, str]:
        """The parameters whose gradients have not arrived: index to name."""
        return {index: self.names[index] for index in sorted(self.expected)}

    # Errors ---------------------------------------------------------------------------------------

    def error(self, message: str, kind: type[Exception] = RuntimeError) -> Exception:
        """The exception to raise; every error of this class is made here."""
        return kind(message)

    def marked_twice(self, index: int) -> Exception:
        """The gradient of a parameter arrived that was not expected (any more)."""
        searched = bool(self.usage.unreachable)
        message = errors.marked_twice(self.rank, index, self.names[index], searched)
        return self.error(message + self.advice.marked_twice)

    def unexpected_gradients(self, bucket: Bucket, indices: Sequence[int]) -> Exception:
        """The gradients of the parameters `indices` do not fit into `bucket`."""
        names = [self.names[index] for index in indices]
        message = errors.unexpected_gradients(self.rank, names)
        return self.error(message + self.advice.unexpected)


def wait_for_future(future: Future, buffer: Tensor) -> Any:
    """Wait for the future of a collective or comm hook on `buffer`; return its value."""
    value = future.wait()
    if buffer.is_cuda:
        wait_for_default_stream(buffer.device)
    return value


def wait_for_default_stream(device: torch.device) -> None:
    """Let the current CUDA stream wait for the default one, unless a CUDA graph is captured.

    NCCL's futures make the current stream wait; gloo's make only the default stream wait.
    """
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if current != default and not torch.cuda.is_current_stream_capturing():
        current.wait_stream(default)


def plan_of_rank_0(plan: Plan, group: dist.ProcessGroup, device: torch.device) -> Plan:
    """Broadcast rank 0's plan: the indices of the parameters in each bucket.

    Each rank's own `plan` must hold the same parameters, in buckets of any size. Costs one
    broadcast of 16 bytes per parameter.
    """
    numbered = [(number, index) for number, bucket in enumerate(plan) for index in bucket]
    message = torch.tensor(numbered, device=device)
    wait_for(dist.broadcast(message, group=group, group_src=0, async_op=True))
    received: dict[int, list[int]] = {}
    for number, index in message.tolist():
        received.setdefault(number, []).append(index)
    return list(received.values())
