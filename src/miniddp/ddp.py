"""MiniDDP: data parallelism around any module, a drop-in for torch's DistributedDataParallel.

Every rank holds a full copy of the module and its own part of the batch. After `backward()` each
parameter's gradient is the average over the ranks, so equal optimizers take equal steps and the
copies stay equal. What the wrapper does, numbered again in the code:

1. *Construction.* All ranks verify that they hold the same model, then take rank 0's parameters and
   buffers (`miniddp.replicas`).
2. *Forward.* It brings the buffers of rank 0 to all ranks, runs the module, and decides whether the
   backward to come is reduced; `no_sync()` makes it decide otherwise.
3. *Backward* is the reducer's (`miniddp.reducer`): the wrapper is not called in it.
4. *Uneven inputs.* Ranks that have run out of data go on to answer the others' collectives
   (`miniddp.extras.join`).
5. *Copies.* Pickling and deepcopy carry the module, the settings and a registered comm hook; the
   reducer is made anew.

Cost: at construction one broadcast of the model; for each forward one broadcast of the buffers, if
there are any; for each backward what `miniddp.reducer` says.

Follows torch/nn/parallel/distributed.py. What is there for compatibility alone is in
`miniddp.torch_drop_in`.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from miniddp import errors as reducer_errors
from miniddp.autograd_graph import (
    OutputGate,
    at_end_of_backward,
    at_start_of_backward,
    find_tensors,
)
from miniddp.extras.compiling import not_compiled, not_compiled_itself
from miniddp.extras.first_steps import FirstSteps
from miniddp.extras.join import MiniDDPJoinHook, learn_and_tell
from miniddp.extras.strict import complete_or_raise
from miniddp.reducer import CommHook, Reducer
from miniddp.replicas import broadcast_tensors, verify_same_model, wait_for
from miniddp.torch_drop_in import WrapperNames, moved_to, synced_buffers_at


class Reduced(NamedTuple):
    """The parameters that a wrapper reduces, each once, and what belongs to them."""

    parameters: list[nn.Parameter]
    names: list[str]
    sparse: list[bool]


# `isinstance(model, DistributedDataParallel)`, by which libraries recognize a wrapper, holds for
# this one too, though it shares no code with it.
@DistributedDataParallel.register
class MiniDDP(WrapperNames, nn.Module, Joinable):
    """Averages the gradients of `module` over the ranks of a process group, during backward.

    Takes every keyword of torch's DistributedDataParallel and two more:

    Args:
        module: the same on every rank; its trainable parameters are reduced.
        device_ids, output_device: for a module on one GPU, that GPU; inputs are moved to it.
        dim: only kept, as in torch.
        broadcast_buffers: deprecated by torch for `forward_sync_buffers`; False leaves the buffers
            out at construction too.
        init_sync: verify and broadcast the model at construction.
        process_group: the ranks that take part; the default group when None.
        bucket_cap_mb: the buckets' size in MiB; a first one of 1 and then 25 when None.
        find_unused_parameters: for models in which a forward may leave parameters unused.
        check_reduction: without effect, as in torch.
        gradient_as_bucket_view: gradients are views of the buckets: one copy of them less.
        static_graph: every iteration uses the same parameters, each as often as in the first.
        delay_all_reduce_named_params, param_to_hook_all_reduce: (name, parameter) pairs that are
            reduced together, when the gradient of the other one arrives.
        mixed_precision: an object with dtypes or None as its `param_dtype`, `reduce_dtype` and
            `buffer_dtype`: see `miniddp.extras.mixed_precision`.
        device_mesh: a one-dimensional mesh instead of `process_group`.
        skip_all_reduce_unused_params: do not send buckets of unused parameters only, which must be
            the same on every rank.
        bucket_cap_mb_list: one size a bucket; the last holds for the rest.
        batched_grad_copy: without effect: small gradients are copied together in any case.
        forward_sync_buffers: whether each forward takes rank 0's buffers; True when None.
        strict: report a missing gradient at the end of the backward it is missing in, on every
            rank, and a backward past the wrapper by an error, not a warning. Costs an all-gather
            of a byte a parameter in each backward.
        bucket_plan: "caps", or "measured": the first steps and the link are timed, and the buckets
            then packed so that communication ends early; see `miniddp.extras.first_steps`. On the CPU,
            without comm hooks, `join` and parameters that may be unused.

    Raises (on every rank, also if the cause is on one alone, unless `init_sync` is False):
        ValueError: an unknown `bucket_plan`, or "measured" with what it does not go with.
        RuntimeError: the ranks' models or settings differ, or nothing is trainable.
        NotImplementedError: `delay_all_reduce_named_params` holds every trainable parameter, or
            `device_mesh` meets parameters that are DTensors.
    """

    # 1. Construction ------------------------------------------------------------------------------

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        strict: bool = False,
        bucket_plan: str = "caps",
    ):
        super().__init__()
        Joinable.__init__(self)
        self.process_group = self._group_of(module, process_group, device_mesh)
        self.module, self.dim, self.strict = module, dim, strict
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.static_graph = False
        self.forward_sync_buffers, sync_buffers_now = synced_buffers_at(
            broadcast_buffers, forward_sync_buffers
        )
        problem, state, settings, reduced = None, {}, {}, None
        try:
            parameters = self._own(module.named_parameters())
            self._check_arguments(
                parameters, check_reduction, delay_all_reduce_named_params, param_to_hook_all_reduce
            )
            self.parameters_to_ignore |= {name for name, _ in delay_all_reduce_named_params or ()}
            parameters = self._own(parameters.items())
            self._set_devices(parameters, device_ids, output_device)
            self._passing_sync_batchnorm_handle(module)
            self._set_bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
            self._set_bucket_plan(bucket_plan)
            reduced = self._reduced()
            state = parameters | (self.named_module_buffers if sync_buffers_now else {})
            settings = self._common_settings(reduced, static_graph, sync_buffers_now)
        except Exception as error:  # of this rank; the others are told, lest they wait for it
            if not init_sync:
                raise
            problem = error

        if init_sync:
            verify_same_model(state, self.process_group, settings, problem)
            broadcast_tensors(list(state.values()), self.process_group, src=0)
        self._delay_all_reduce(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._make_reducer(reduced, static_graph)
        if static_graph:
            self._set_static_graph()

    def _common_settings(
        self, reduced: Reduced, static_graph: bool, sync_buffers_now: bool
    ) -> dict[str, Any]:
        """What decides which collectives a rank takes part in, and has to be the same on all."""
        return {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": static_graph,
            "strict": self.strict,
            "bucket caps in bytes": self._caps,
            "bucket_plan": self.bucket_plan,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "forward_sync_buffers (or broadcast_buffers)": self.forward_sync_buffers,
            "buffers broadcast at construction": sync_buffers_now,
            "parameters with sparse gradients": list(compress(reduced.names, reduced.sparse)),
            "mixed_precision.reduce_dtype": getattr(self.mixed_precision, "reduce_dtype", None),
            "mixed_precision.param_dtype": getattr(self.mixed_precision, "param_dtype", None),
        }

    def _own(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: t for name, t in named if name not in self.parameters_to_ignore}

    def _reduced(self) -> Reduced:
        parameters, sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        return Reduced(parameters, list(names.values()), sparse)

    def _make_reducer(self, reduced: Reduced, static_graph: bool) -> None:
        self.reducer = Reducer(
            reduced.parameters,
            reduced.names,
            self.process_group,
            caps=self._caps,
            sparse=reduced.sparse,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view and not self.mixed_precision,
            plan_at_once=bool(self.bucket_bytes_cap_list)
            or (self.find_unused_parameters and not static_graph),
            skip_unused=self.skip_all_reduce_unused_params,
        )
        self._first_steps = FirstSteps(self.reducer) if self.bucket_plan == "measured" else None
        self._made_reducer()

    # 2. Forward -----------------------------------------------------------------------------------

    @not_compiled_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output; the backward from it is reduced unless `no_sync()` is in force.

        Raises:
            RuntimeError: the backward before did not produce all gradients.
        """
        with torch.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    @not_compiled
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._before_forward()
        participants = Join.notify_join_context(self)
        self.reducer.participants = None if self._divide_by_initial_world_size else participants
        if torch.is_grad_enabled():
            self._report_strays()
            if self.reducer.rebuild():
                self._has_rebuilt_buckets = True
            if self._first_steps is not None and self._first_steps.before_forward():
                self._first_steps = None
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            return moved_to((inputs, kwargs), torch.device(self.device_type, self.device_ids[0]))
        return inputs, kwargs

    @not_compiled
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = synced
        reducer = self.reducer
        if synced:
            reducer.arm(find_tensors(output) if reducer.looks_for_unused else ())
        if torch.is_grad_enabled():
            reducer.accumulates_locally = not synced
        if reducer.looks_for_unused:
            output = OutputGate.pass_through(output, self._ddp_sink_clone)
        if synced and reducer.learns_graph:
            self._at_end_of_backward(
                output, learn_and_tell if self._join_config.enable else Reducer.learn_graph
            )
        elif synced and self.strict:
            self._at_end_of_backward(output, complete_or_raise)
        self._clear_grad_buffer()
        if self.mixed_precision is not None and not torch.is_grad_enabled():
            self._precision.widen()
        return output

    def _at_end_of_backward(self, output: Any, act: Callable[[Reducer], None]) -> None:
        """Act at the end of each backward pass that comes by `output`, once a tensor in it."""
        this = weakref.ref(self.reducer)

        def on_entry() -> None:
            reducer = this()
            if reducer is not None:
                at_end_of_backward(lambda: act(reducer))

        at_start_of_backward(output, on_entry)

    def _report_strays(self) -> None:
        # With strict=True the next backward tells the other ranks, and all of them raise.
        if self.reducer.strayed and not self.strict:
            self.reducer.strayed = False
            # Ten frames up, torch's own among them, stands the line that called the wrapper.
            warnings.warn(reducer_errors.strayed([self._distributed_rank]), stacklevel=10)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in here leave the gradients of their backwards local, to accumulate.

        The first synchronized backward afterwards reduces the sum of all. What counts is where the
        forward runs: a backward called in here of a forward before is still reduced.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        self.reducer.accumulates_locally = True
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` communicate each bucket instead of the all-reduce.

        Args:
            state: handed to every call, on this rank.
            hook: gets a `GradBucket`, whose gradients are *not* divided, and returns a Future of
                one tensor of the bucket's size: the gradients to use. Names its second argument
                `bucket`.

        Raises:
            TypeError, ValueError: `hook` is not callable, or its annotations say something else.
            RuntimeError: a hook is registered already.
        """
        self._check_comm_hook(hook)
        self._set_comm_hook(hook, state, getattr(hook, "__qualname__", repr(hook)))
        self._comm_hooks.append((hook, state))

    # Buffers: whether a forward broadcasts them is decided by the forward before. After one without
    # synchronization none of the ranks has stepped, and the buffers may differ as the gradients do.

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward takes the buffers of another rank."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and len(self.modules_buffers) > 0
        )

    @torch.no_grad()
    def _sync_buffers(self) -> None:
        # Without Join rank 0 is the source; with Join it may have run out of data long ago.
        src = (
            self._find_common_rank(self._distributed_rank, True) if self._join_config.enable else 0
        )
        self._assign_modules_buffers()
        self._sync_module_buffers(src)

    # 4. Uneven inputs -----------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs.

        Args:
            divide_by_initial_world_size: divide gradients by W for ever, so that each input counts
                the same; False: by the number of ranks that still have inputs.
            enable: False makes this a context without effect.
            throw_on_early_termination: raise on all ranks as soon as one runs out of inputs.

        Raises:
            ValueError: with `bucket_plan="measured"`, as joined ranks take no times; with
                `skip_all_reduce_unused_params` or `delay_all_reduce_named_params`, as joined ranks
                cannot know what the others send.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What this wrapper does on a rank that has joined; called by `Join`."""
        self._refuse_measured_plan("join()")
        self._refuse_to_join()
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        self._joins_uneven_inputs = True
        return MiniDDPJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """Tell the joined ranks whether this iteration's backward is reduced; they need to know."""
        wants = not is_joined_rank and self.require_backward_grad_sync
        flag = torch.tensor([float(wants)], device=self.device)
        work = dist.all_reduce(flag, group=self.process_group, async_op=True)
        if not is_joined_rank:
            return None
        wait_for(work)
        return flag.item() != 0

    def _find_common_rank(self, rank: int, is_candidate: bool) -> int:
        """The highest rank among the candidates."""
        flag = torch.tensor([rank if is_candidate else -1], device=self.device)
        largest = dist.ReduceOp.MAX
        wait_for(dist.all_reduce(flag, op=largest, group=self.process_group, async_op=True))
        if flag.item() == -1:
            raise ValueError("no rank offers its model to the others: join and forward disagree")
        return int(flag.item())

    # 5. Copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        if self._delayed:
            raise RuntimeError(
                "a MiniDDP with delay_all_reduce_named_params cannot be copied: its delayed "
                "gradients hang on this module's parameters. Copy its .module and wrap the copy."
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_precision", "_first_steps"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = dist.group.WORLD
        super().__setstate__(state)
        hooks = self._comm_hooks
        self._make_reducer(self._reduced(), self.static_graph)
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)
        if self.static_graph:
            self.reducer.expect_static_graph()
