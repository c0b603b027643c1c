"""`DistributedDataParallel(MiniDDP)`: torch's class name and keywords, and the private names that
libraries call.

This file adds to the wrapper of `miniddp.ddp`:

- the rare keywords, and forwards for torch.compile and for mixed precision,
- comm hooks by torch's rules, and optimizers in backward,
- uneven inputs (Join), copies, and pickles,
- of the private methods of torch's wrapper, those that torch's tests or a library call.

It behaves like torch/nn/parallel/distributed.py.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from miniddp import errors
from miniddp.buckets import MIB, bucket_caps
from miniddp.ddp import disable_dynamo
from miniddp.reducer import ReducerState
from miniddp.torch_drop_in.buffers import BufferSync
from miniddp.torch_drop_in.delayed import DelayedAllReduce
from miniddp.torch_drop_in.join import (
    DDPJoinHook,
    learn_and_share,
    refuse_to_join,
    tell_whether_synced,
)
from miniddp.torch_drop_in.keywords import (
    check_comm_hook,
    devices_of,
    group_of,
    moved_to,
    synced_buffers_at,
)
from miniddp.torch_drop_in.log import Log
from miniddp.torch_drop_in.mixed_precision import MixedPrecision
from miniddp.torch_drop_in.strict import at_end_of_each_backward, complete_or_raise
from miniddp.torch_drop_in.torch_reducer import TorchReducer


# `isinstance(model, torch.nn.parallel.DistributedDataParallel)`, by which libraries recognize a
# wrapper, holds for this one too, though it shares no code with it.
@TorchDistributedDataParallel.register
class DistributedDataParallel(BufferSync, Joinable):
    """Averages the gradients of `module` over the ranks of a process group, during backward.

    Args:
        module: the same on every rank; its trainable parameters are reduced.
        device_ids, output_device: for a module on one GPU, that GPU; inputs are moved to it.
        dim: without effect, as in torch with one device per process.
        broadcast_buffers: torch deprecates it in favor of `forward_sync_buffers`. False also leaves
            out the broadcast of buffers at construction.
        init_sync: verify and broadcast the model at construction.
        process_group: the ranks that take part; the default group when None.
        bucket_cap_mb: the buckets' size in MiB; when None, 1 for the first and 25 for the others.
        find_unused_parameters: for models in which a forward may leave parameters unused.
        check_reduction: without effect, as in torch, which deprecates it.
        gradient_as_bucket_view: gradients are views of the buckets, which saves one copy of them.
        static_graph: every iteration uses the same parameters, each as often as in the first.
        delay_all_reduce_named_params, param_to_hook_all_reduce: (name, parameter) pairs that are
            reduced together, when the gradient of `param_to_hook_all_reduce` is ready.
        mixed_precision: an object with dtypes or None as its `param_dtype`, `reduce_dtype`, and
            `buffer_dtype`; see `miniddp.torch_drop_in.mixed_precision`.
        device_mesh: a one-dimensional mesh instead of `process_group`.
        skip_all_reduce_unused_params: do not send buckets that hold only unused parameters. Every
            rank must then have the same unused parameters.
        bucket_cap_mb_list: one size per bucket; the last applies to the remaining buckets.
        batched_grad_copy: without effect: neighboring gradients are copied together in any case.
        forward_sync_buffers: whether each forward takes rank 0's buffers; True when None.
        lazy_bucket_allocation: without effect: buckets are allocated at construction, and again
            when they are rebuilt. (A keyword of torch 2.15.)
        strict: raise an error for a missing gradient on every rank, at the end of that backward.
            A backward that bypassed the wrapper is then an error instead of a warning. Costs one
            all-gather per backward, of one byte per parameter.

    Raises (on every rank, even if only one has the cause, unless `init_sync` is False):
        RuntimeError: the ranks' models or settings differ, or nothing is trainable.
        NotImplementedError: `delay_all_reduce_named_params` holds every trainable parameter, or
            `device_mesh` is combined with parameters that are DTensors.
    """

    takes_wrappers = True
    _divide_by_initial_world_size = True
    _joins_uneven_inputs = False
    _lazy_init_ran = False
    broadcast_bucket_size = 250 * MIB
    reducer: TorchReducer

    # Construction ---------------------------------------------------------------------------------

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
        lazy_bucket_allocation: bool = False,
        *,
        strict: bool = False,
    ):
        Joinable.__init__(self)
        group = group_of(module, process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        # What MiniDDP's constructor, called below, needs to know.
        self.device_ids, self.output_device = device_ids, output_device
        delayed = {name for name, _ in delay_all_reduce_named_params or ()}
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore = ignored | delayed
        self.static_graph = False
        self._starts_static = static_graph  # asked for by keyword, before the reducer exists
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.bucket_cap_mb_list = bucket_cap_mb_list
        self.strict = strict
        self._delayed_pairs = delay_all_reduce_named_params, param_to_hook_all_reduce
        synced, self._syncs_buffers_now = synced_buffers_at(broadcast_buffers, forward_sync_buffers)
        super().__init__(
            module,
            group,
            broadcast_buffers=synced,
            init_sync=init_sync,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        if static_graph:
            self._set_static_graph()

    def resolve_settings(self) -> None:
        delayed, trigger = self._delayed_pairs
        if (delayed is None) != (trigger is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
                "same time."
            )
        self._refuse_to_delay_everything()
        super().resolve_settings()
        parameters = self.synced_parameters()
        for name, parameter in parameters.items():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise RuntimeError(
                    "Modules with uninitialized parameters can't be used with "
                    f"`DistributedDataParallel`: {name}. Run a dummy forward pass to correctly "
                    "initialize the modules"
                )
        self.device_type, self.device_ids, self.output_device = devices_of(
            parameters, self.device_ids, self.output_device
        )
        self.device = next(iter(parameters.values())).device
        self._passing_sync_batchnorm_handle(self.module)
        self.caps = bucket_caps(self.bucket_cap_mb_list or self.bucket_cap_mb)
        self.bucket_bytes_cap = max(self.caps)
        self.bucket_bytes_cap_list = list(self.caps) if self.bucket_cap_mb_list else []

    def _refuse_to_delay_everything(self) -> None:
        trainable = any(p.requires_grad for p in self.module.parameters())
        reduced_in_turn = any(p.requires_grad for p in self.synced_parameters().values())
        if self._delayed_pairs[0] is not None and trainable and not reduced_in_turn:
            raise NotImplementedError(
                "MiniDDP does not support delay_all_reduce_named_params of every trainable "
                "parameter: leave at least one to be reduced in its turn"
            )

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Raise ValueError for a SyncBatchNorm of torch on the CPU."""
        for name, layer in module.named_modules():
            # A subclass may know how.
            if self.device_type == "cpu" and type(layer) is SyncBatchNorm:
                raise ValueError(
                    f"SyncBatchNorm layers only work with GPU modules, but {name} is on the CPU; "
                    "miniddp.sync_batch_norm.SyncBatchNorm works there"
                )

    def state_to_broadcast(self) -> dict[str, Tensor]:
        buffers = self.synced_buffers() if self._syncs_buffers_now else {}
        return self.synced_parameters() | buffers

    def common_settings(self) -> dict[str, Any]:
        parameters, sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters).values()
        settings = super().common_settings()
        settings["broadcast_buffers (or forward_sync_buffers)"] = settings.pop("broadcast_buffers")
        return settings | {
            "static_graph": self._starts_static,
            "strict": self.strict,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "buffers broadcast at construction": self._syncs_buffers_now,
            "parameters with sparse gradients": list(compress(names, sparse)),
            "mixed_precision.reduce_dtype": getattr(self.mixed_precision, "reduce_dtype", None),
            "mixed_precision.param_dtype": getattr(self.mixed_precision, "param_dtype", None),
            "mixed_precision.buffer_dtype": getattr(self.mixed_precision, "buffer_dtype", None),
        }

    def synced_parameters(self) -> dict[str, nn.Parameter]:
        return self._without_ignored(super().synced_parameters())

    def synced_buffers(self) -> dict[str, Tensor]:
        return self._without_ignored(super().synced_buffers())

    def _without_ignored(self, named: dict[str, Any]) -> dict[str, Any]:
        return {name: t for name, t in named.items() if name not in self.parameters_to_ignore}

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The parameters to reduce, each once, and whether each one's gradient is sparse."""
        found: dict[nn.Parameter, bool] = {}
        for prefix, module in self.module.named_modules():
            sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.requires_grad and name not in self.parameters_to_ignore:
                    found.setdefault(parameter, sparse)
        return list(found), list(found.values())

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[nn.Parameter]
    ) -> dict[int, str]:
        """The name of each parameter that is reduced, by its index; of a shared one, the last."""
        index_of = {parameter: index for index, parameter in enumerate(parameters)}
        names: dict[int, str] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if parameter.requires_grad and name not in self.parameters_to_ignore:
                if parameter not in index_of:
                    raise ValueError(
                        f"Param with name {name} found in module parameters, but not among those "
                        "that are reduced: was it added or unfrozen after the wrapper was made? "
                        "Wrap the module again."
                    )
                names[index_of[parameter]] = name
        if len(names) != len(index_of):
            raise ValueError(
                "Expected param to name mapping to cover all parameters, but got conflicting "
                f"lengths: {len(index_of)} vs {len(names)}."
            )
        return names

    def make_reducer(self) -> TorchReducer:
        """Also made again from a pickle or for a copy, with what belongs to it."""
        parameters, sparse = self._build_params_for_reducer()
        self.reducer = TorchReducer(
            parameters,
            list(self._build_debug_param_to_name_mapping(parameters).values()),
            self.process_group,
            caps=self.caps,
            sparse=sparse,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view and not self.mixed_precision,
            plan_at_once=bool(self.bucket_bytes_cap_list)
            or (self.find_unused_parameters and not self._starts_static),
            skip_unused=self.skip_all_reduce_unused_params,
        )
        named, trigger = self._delayed_pairs
        self._delayed = None
        if named:
            delayed = [parameter for _, parameter in named]
            self._delayed = DelayedAllReduce(delayed, trigger, self.reducer)
        self._lazy_init_ran = False
        self._comm_hooks: list[tuple[Callable, Any]] = []
        self.logger = Log(self)
        if self.mixed_precision is not None:
            self._precision = MixedPrecision(self, self.mixed_precision)
            self._set_comm_hook(self._precision.reduce, None, "mixed_precision")
        return self.reducer

    # Forward --------------------------------------------------------------------------------------

    @disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._lazy_init_ran:
            self._lazy_init_ran = True
            self._setup_in_backward_optimizers()
        if self.mixed_precision is not None and self.reducer.state is ReducerState.IDLE:
            self._precision.restore_full_precision()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.logger.forward_begins()
        participants = Join.notify_join_context(self)
        self.reducer.participants = None if self._divide_by_initial_world_size else participants
        inputs, kwargs = super()._pre_forward(*inputs, **kwargs)
        if self._join_config.enable:
            tell_whether_synced(self, is_joined_rank=False)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = moved_to((inputs, kwargs), device)
        if self.mixed_precision is not None:
            self._precision.use_low_precision()
            inputs, kwargs = self._precision.cast((inputs, kwargs))
        return inputs, kwargs

    @disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self.sync_buffers()
        output = super()._post_forward(output)
        if self.require_forward_param_sync:
            if self.reducer.learns_graph:
                learn = learn_and_share if self._join_config.enable else TorchReducer.learn_graph
                self._at_end_of_backward(output, learn)
            elif self.strict:
                self._at_end_of_backward(output, complete_or_raise)
        if self._delayed is not None:
            self._delayed.set_missing_gradients()
        if (
            self.mixed_precision is not None
            and not torch.is_grad_enabled()
            and self._precision.was_full
        ):
            self._precision.restore_full_precision()
        return output

    def _at_end_of_backward(self, output: Any, act: Callable[[TorchReducer], Any]) -> None:
        found = at_end_of_each_backward(output, self.reducer, act)
        self.reducer.act_at_first_gradient = None if found else act

    def report_unsynchronized(self) -> None:
        # With strict=True the next backward tells the other ranks, and all of them raise.
        if not self.strict:
            super().report_unsynchronized()

    @contextmanager
    @partial(disable_dynamo, recursive=False)
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Tell Dynamo whose forward runs: it splits a compiled module's graph at its bucket caps.

        Without the split, all gradients would arrive at the very end of backward. Dynamo asks
        torch's class; there is no public way.
        """
        outer = TorchDistributedDataParallel._active_ddp_module
        TorchDistributedDataParallel._active_ddp_module = self
        try:
            yield
        finally:
            TorchDistributedDataParallel._active_ddp_module = outer

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        # Dynamo asks this class where it stands in torch's place.
        return TorchDistributedDataParallel._active_ddp_module

    # Comm hooks and optimizers --------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Callable) -> None:
        """Let `hook(state, bucket)` communicate each bucket instead of the all-reduce.

        Args:
            state: passed to every call on this rank.
            hook: receives a `GradBucket`, whose gradients are *not* divided, and returns a Future
                of one tensor of the bucket's size: the gradients to use. Its second argument is
                named `bucket`.

        Raises TypeError or ValueError if `hook` is not callable or its signature does not fit;
        RuntimeError if a hook is registered already.
        """
        check_comm_hook(hook, self.reducer.error)
        self._set_comm_hook(hook, state, getattr(hook, "__qualname__", repr(hook)))
        self._comm_hooks.append((hook, state))

    def _set_comm_hook(self, hook: Callable, state: Any, name: str) -> None:
        if self.reducer.comm_hook is not None:
            raise self.reducer.error(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self.reducer.comm_hook = (hook, state)
        self.logger.logging_data["comm_hook"] = name

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register the hook that `dist.BuiltinCommHookType` names."""
        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        hook, state = hooks[comm_hook_type], None
        if self.process_group != dist.group.WORLD:
            state = self.process_group
        self._set_comm_hook(hook, state, str(comm_hook_type))
        self._comm_hooks.append((hook, state))

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Step each parameter by an optimizer of class `optim` as soon as its bucket is reduced."""
        # The module imports torch's own wrapper, so it is imported when it is needed.
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)

    def _setup_in_backward_optimizers(self) -> None:
        """Take over from `apply_optimizer_in_backward`: step after the reduction, not before."""
        parameters = list(self.synced_parameters().values())
        if not any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
            return
        from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
            _apply_optim_in_backward_hook,
        )

        handles = dist.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
        for parameter in parameters:
            for handle in handles.get(parameter, ()):
                handle.remove()
        hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=self.gradient_as_bucket_view)
        # Not noted among the hooks that a copy takes over: it sets up its own.
        self._set_comm_hook(hook, weakref.ref(self), hook.__qualname__)
        # The optimizer has used up the gradients that are None by then.
        self.reducer.usage.creates_gradients = False

    # Uneven inputs (Join) -------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs.

        Args:
            divide_by_initial_world_size: always divide gradients by W, so that each input counts
                the same. False: by the number of ranks that still have inputs.
            enable: False makes this a context without effect.
            throw_on_early_termination: raise on all ranks as soon as one runs out of inputs.

        Raises:
            ValueError: with `skip_all_reduce_unused_params` or `delay_all_reduce_named_params`, as
                joined ranks cannot know what the others send.

        A rank that has joined does not run the model. If the model's forward calls collectives, as
        SyncBatchNorm does, the others wait for it forever: set `throw_on_early_termination`.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What this wrapper does on a rank that has joined; called by `Join`."""
        refuse_to_join(self)
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        self._joins_uneven_inputs = True
        return DDPJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # Settings -------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Declare that every iteration uses the same parameters in the same way."""
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.",
                stacklevel=errors.stacklevel_of_caller(),
            )
            return
        if self.logger.iteration > 0:
            raise self.reducer.error(
                "_set_static_graph() should be called before training loop starts after "
                "DistributedDataParallel is constructed."
            )
        self.static_graph = True
        self.reducer.expect_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, but a static "
                "graph detects them by itself, if they do not change during training.",
                stacklevel=errors.stacklevel_of_caller(),
            )

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.has_rebuilt_bucket

    def _set_ddp_sink_clone(self, val: bool) -> None:
        self._ddp_sink_clone = val

    def _update_process_group(self, new_process_group: Any) -> None:
        """Use another group of ranks from the next forward on, and rebuild the buckets."""
        self.reducer.has_rebuilt_bucket = False
        self.reducer.reset_state()
        if new_process_group is not dist.GroupMember.NON_GROUP_MEMBER:
            self.process_group = new_process_group
            self.reducer.process_group = self.reducer.usage.process_group = new_process_group
            self.reducer.rank = new_process_group.rank()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave these names, seen from `module`, to the user: not broadcast, not reduced."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters (or pairs of name and parameter) that are not ignored."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the last announced backward lacks gradients."""
        if self.reducer.state is ReducerState.READY:
            self.reducer.enter(ReducerState.REDUCING)
        self.reducer.ensure_prior_reduction_finished()

    # Copies and pickles: the module, the settings, and a comm hook, with a new reducer ------------

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor"
            )
        if self._delayed:
            raise RuntimeError(
                "a MiniDDP with delay_all_reduce_named_params cannot be copied: its delayed "
                "gradients hang on this module's parameters. Copy its .module and wrap the copy."
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_precision"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = dist.group.WORLD
        super().__setstate__(state)
        hooks = self._comm_hooks
        self._starts_static = self.static_graph
        self.make_reducer()
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)
        if self.static_graph:
            self.reducer.expect_static_graph()

    # Logging --------------------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Settings, environment, buckets and times (ns) of this wrapper, by torch's keys."""
        return self.logger.snapshot(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Take times in every `sample_rate`-th iteration, after the first ten."""
        if sample_rate < 1:
            raise ValueError(
                "DDP runtime logging sample rate should be equal or greater than 1, but is "
                f"{sample_rate}"
            )
        self.logger.sample_rate = sample_rate
