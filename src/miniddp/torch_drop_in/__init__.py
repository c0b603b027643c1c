"""What exists for compatibility alone, so that `ddp.py` and `reducer.py` stay a read.

Rare keywords of torch's DistributedDataParallel; names that its tests, its comm hooks, its
optimizers and other libraries call on the wrapper or on its reducer; the dictionary of figures
that it logs. Where a name has a plain counterpart, the method here is one line that calls it. The
behavior is that of torch/nn/parallel/distributed.py and
torch/csrc/distributed/c10d/{reducer,logger}.cpp.
"""

import copy
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
from torch.nn.utils.rnn import PackedSequence

from miniddp.bucket import Bucket, GradBucket
from miniddp.buckets import MIB, bucket_caps
from miniddp.extras.compiling import active, active_wrapper, not_compiled_itself
from miniddp.extras.mixed_precision import MixedPrecision
from miniddp.replicas import broadcast_tensors, size_of_group, wait_for

# Keywords -----------------------------------------------------------------------------------------


def devices_of(
    parameters: Mapping[str, Tensor],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[str, list[int] | None, int | None]:
    """The type of the parameters' devices, and the two keywords as indices; None where not used.

    Raises:
        ValueError: several types of devices, or keywords that fit one GPU for another module.
    """
    devices = {parameter.device for parameter in parameters.values()}
    types = {device.type for device in devices}
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if len(types) != 1:
        raise ValueError(
            "MiniDDP's input module must be on the same type of devices, but its parameters are "
            f"located in {sorted(types)}; move the module to one of them first"
        )
    device_type = types.pop()
    if not device_ids or device_type == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}; "
                "leave both out"
            )
        return device_type, None, None
    index = _index_of(device_ids[0])
    return device_type, [index], index if output_device is None else _index_of(output_device)


def moved_to(value: Any, device: torch.device) -> Any:
    """`value`, tuples, lists and dicts in it copied, with every tensor in them on `device`.

    A PackedSequence is moved whole, since a part of it belongs on the CPU.
    """
    if isinstance(value, Tensor | PackedSequence):
        return value.to(device)
    if isinstance(value, list | tuple):
        parts = [moved_to(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        moved = copy.copy(value)
        moved.update({key: moved_to(part, device) for key, part in value.items()})
        return moved
    return value


def _index_of(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return torch.cuda.current_device() if device.index is None else device.index


def synced_buffers_at(
    broadcast_buffers: bool | None, forward_sync: bool | None
) -> tuple[bool, bool]:
    """Whether buffers are synchronized (in forwards, at construction), from the two keywords."""
    if forward_sync is not None:
        if broadcast_buffers is not None:
            warnings.warn(
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. "
                "`broadcast_buffers` is deprecated and its value is ignored when "
                "`forward_sync_buffers` is provided.",
                FutureWarning,
                stacklevel=3,
            )
        return forward_sync, True
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: "
            "unlike `broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at "
            "init.",
            FutureWarning,
            stacklevel=3,
        )
        return broadcast_buffers, broadcast_buffers
    return True, True


def check_comm_hook(hook: Any, error: Callable[[str, type[Exception]], Exception]) -> None:
    """Raise the `error` of a TypeError or ValueError if `hook` cannot be a comm hook."""
    if not callable(hook):
        raise error("Communication hook must be callable.", TypeError)
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        text = f"Communication hook: its second argument must be named bucket, found {signature}."
        raise error(text, ValueError)
    bucket = signature.parameters["bucket"].annotation
    if bucket not in (inspect.Parameter.empty, dist.GradBucket) and not (
        isinstance(bucket, type) and bucket.__name__ == "GradBucket"
    ):
        text = "Communication hook: bucket annotation should be dist.GradBucket."
        raise error(text, ValueError)
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, Future[Tensor]):
        text = "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        raise error(text, ValueError)


# Names on the reducer -----------------------------------------------------------------------------


class ReducerNames:
    """Methods of `torch.distributed.Reducer` that others call, over those of `miniddp.Reducer`."""

    last_error: str | None = None

    def error(self, message: str, kind: type[Exception] = RuntimeError) -> Exception:
        """The exception to raise; its text is kept for `_get_ddp_logging_data`."""
        self.last_error = message
        return kind(message)

    def skips(self, bucket: Bucket) -> bool:
        """Whether `skip_all_reduce_unused_params` spares this bucket in this backward."""
        return self.skip_unused and set(bucket.indices) <= set(self.unused)

    def launched_until(self) -> int:
        """One more than the index of the last bucket that this backward launches."""
        end = len(self.buckets)
        while self.skips(self.buckets[end - 1]):
            end -= 1
        return end

    # Distributed autograd (RPC) keeps gradients in a context of its own, not in `.grad`. They are
    # lent to `.grad` for the time of the reduction.

    rpc_context: int | None = None

    def find_rpc_context(self) -> int | None:
        """The number of the distributed-autograd context that is open in this thread, if any."""
        if not dist.rpc.is_available() or not dist.rpc.api._is_current_rpc_agent_set():
            return None
        self.lent: dict[int, tuple[Tensor, Tensor | None]] = {}
        try:  # there is no public way to ask
            return torch._C._distributed_autograd._current_context()._context_id()
        except RuntimeError:
            return None

    def borrow_gradient(self, index: int) -> None:
        """Let `.grad` be the context's gradient of a parameter."""
        parameter = self.parameters[index]
        gradient = dist.autograd.get_gradients(self.rpc_context).get(parameter)
        if gradient is not None and index not in self.lent:
            self.lent[index] = (gradient, parameter.grad)
            parameter.grad = gradient

    def return_gradients(self) -> None:
        """Write the reduced gradients to the context, and let `.grad` be what it was."""
        for index, (gradient, before) in self.lent.items():
            parameter = self.parameters[index]
            if parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = before
        self.rpc_context = None

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Reduce a backward whose forward ran under `no_sync`: Lightning and Accelerate do this."""
        self.arm(outputs if self.looks_for_unused else ())
        self.accumulates_locally = False

    def _autograd_hook(self, index: int) -> None:
        self.on_gradient(index)

    def _delay_all_reduce(self) -> None:
        self.learn_graph()

    def _reset_state(self) -> None:
        self.start_over()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        self.process_group = new_process_group
        self.start_over()

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        self.participants = None if use_static_world_size else work

    def set_logger(self, logger: Any) -> None:
        """torch's reducer writes its times to the logger; here the logger reads them."""

    def prepare_for_forward(self) -> None:
        """torch starts its timer here; there is nothing to prepare."""

    def _run_allreduce_hook(self, bucket: Any) -> Future:
        return self.all_reduce(bucket)

    def _run_comm_hook(self, bucket: Any) -> Future:
        return self.reduce(bucket)

    def _rebuild_buckets(self) -> bool:
        return self.rebuild()

    def _push_all_rebuilt_params(self) -> None:
        """On a rank that saw no gradients: be ready to take rank 0's plan at the next rebuild."""
        if not self.order:
            self.order = list(range(len(self.parameters)))

    def _get_zeros_like_grad_buckets(self) -> list[Any]:
        """The buckets in launch order, full of zeros: what a rank without inputs contributes."""
        return [
            GradBucket(bucket, number, len(self.buckets), bucket.zeros())
            for number, bucket in enumerate(self.buckets)
        ]

    def _get_local_used_map(self) -> Tensor:
        return self.used_anywhere

    def _install_post_backward_futures(self, futures: Iterable[Future]) -> None:
        self.extra_futures.extend(futures)

    def _set_static_graph(self) -> None:
        self.expect_static_graph()

    def _set_optimizer_in_backward(self) -> None:
        self.optimizer_in_backward = True

    def _ddp_graph_static(self) -> bool:
        return self.same_unused_so_far

    def _check_reducer_finalized(self) -> None:
        if self.armed:
            self.unfinished = True
        self.check_finished()

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()


# Names on the wrapper -----------------------------------------------------------------------------


class _BufferCommHookLocation(Enum):
    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class _BufferCommHook(NamedTuple):
    buffer_comm_hook: Callable
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: _BufferCommHookLocation


class WrapperNames:
    """Attributes and methods of torch's wrapper that others use, over those of `MiniDDP`."""

    _ddp_sink_clone = True
    _divide_by_initial_world_size = True
    _joins_uneven_inputs = False
    _static_graph_delay_allreduce_enqueued = False
    _has_rebuilt_buckets = False
    _lazy_init_ran = False
    _use_python_reducer = False
    broadcast_bucket_size = 250 * MIB

    # Construction

    def _check_arguments(
        self, parameters: Mapping[str, Tensor], check_reduction: bool, delayed: Any, delayed_by: Any
    ) -> None:
        if (delayed is None) != (delayed_by is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
                "same time."
            )
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument is deprecated. Please avoid using it.",
                FutureWarning,
                stacklevel=3,
            )
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient. Use the module itself."
            )
        delayed_names = {name for name, _ in delayed or ()}
        if all(n in delayed_names for n, p in parameters.items() if p.requires_grad):
            raise NotImplementedError(
                "MiniDDP does not support delay_all_reduce_named_params of every trainable "
                "parameter: leave at least one to be reduced in its turn"
            )
        for name, parameter in parameters.items():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise RuntimeError(
                    "Modules with uninitialized parameters can't be used with "
                    f"`DistributedDataParallel`: {name}. Run a dummy forward pass to correctly "
                    "initialize the modules"
                )

    def _set_devices(
        self, parameters: Mapping[str, Tensor], device_ids: Any, output_device: Any
    ) -> None:
        self.device_type, self.device_ids, self.output_device = devices_of(
            parameters, device_ids, output_device
        )
        self.device = next(iter(parameters.values())).device

    def _group_of(
        self, module: nn.Module, process_group: Any, device_mesh: Any
    ) -> dist.ProcessGroup:
        if device_mesh is None:
            if not dist.is_initialized():
                raise ValueError(
                    "Default process group has not been initialized, please make sure to call "
                    "init_process_group."
                )
            if process_group is dist.GroupMember.NON_GROUP_MEMBER:
                size_of_group(process_group)  # raises
            return dist.group.WORLD if process_group is None else process_group
        if process_group is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            raise NotImplementedError(
                "MiniDDP does not support a device_mesh together with DTensor parameters"
            )
        self.device_mesh = device_mesh
        return device_mesh.get_group(mesh_dim=0)

    def _set_bucket_caps(self, cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> None:
        self._caps = bucket_caps(cap_mb, cap_mb_list)
        self.bucket_bytes_cap = max(self._caps)
        self.bucket_bytes_cap_list = list(self._caps) if cap_mb_list else []
        self.bucket_bytes_cap_default = cap_mb is None and not cap_mb_list

    def _set_bucket_plan(self, bucket_plan: str) -> None:
        if bucket_plan not in ("caps", "measured"):
            raise ValueError(f'bucket_plan is {bucket_plan!r}: take "caps" or "measured"')
        self.bucket_plan = bucket_plan
        if self.find_unused_parameters:
            self._refuse_measured_plan("find_unused_parameters, which never repacks")
        if self.mixed_precision is not None:
            self._refuse_measured_plan("mixed_precision")
        if self.device.type != "cpu":
            self._refuse_measured_plan(f"a module on {self.device}: its clock is the CPU's")

    def _refuse_measured_plan(self, what: str) -> None:
        if self.bucket_plan == "measured":
            raise ValueError(
                f'bucket_plan="measured" does not go with {what}. Leave one of the two out.'
            )

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The parameters to reduce, each once, and for each whether its gradient is sparse."""
        found: dict[nn.Parameter, bool] = {}
        for prefix, module in self.module.named_modules():
            sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.requires_grad and name not in self.parameters_to_ignore:
                    found.setdefault(parameter, sparse)
        self._assign_modules_buffers()
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

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Raise ValueError for a SyncBatchNorm of torch on the CPU."""
        for name, layer in module.named_modules():
            if (
                self.device_type == "cpu" and type(layer) is SyncBatchNorm
            ):  # a subclass may know how
                raise ValueError(
                    f"SyncBatchNorm layers only work with GPU modules, but {name} is on the CPU; "
                    "miniddp.training.sync_batch_norm has one that works there"
                )

    def _made_reducer(self) -> None:
        """After a reducer was made, at construction or from a pickle."""
        self._lazy_init_ran = False
        self._has_rebuilt_buckets = False
        self._comm_hooks: list[tuple[Callable, Any]] = []
        self.logger = _Log(self)
        if self.mixed_precision is not None:
            self._precision = MixedPrecision(self, self.mixed_precision)
            self._set_comm_hook(self._precision.reduce, None, "mixed_precision")

    def _delay_all_reduce(
        self, named: Sequence[tuple[str, nn.Parameter]] | None, trigger: nn.Parameter | None
    ) -> None:
        """Reduce the parameters in `named` by one all-reduce, when `trigger` gets its gradient.

        Their gradients are views of one flat buffer from the end of each forward on. The all-reduce
        is awaited at the end of the backward.
        """
        self._delayed: list[tuple[nn.Parameter, Tensor]] = []
        if not named:
            return
        parameters = [parameter for _, parameter in named]
        broadcast_tensors(parameters, self.process_group, 0)
        flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
        parts = flat.split([parameter.numel() for parameter in parameters])
        self._delayed = [
            (parameter, part.view(parameter.shape))
            for parameter, part in zip(parameters, parts, strict=True)
        ]
        this = weakref.ref(self)

        def reduce_delayed(gradient: Tensor) -> None:
            ddp = this()
            if ddp is not None and ddp.reducer.armed:
                flat.div_(ddp.process_group.size())
                work = dist.all_reduce(flat, group=ddp.process_group, async_op=True)
                ddp.reducer.extra_futures.append(work.get_future())

        trigger.register_hook(reduce_delayed)

    # Forward

    def _before_forward(self) -> None:
        if not self._lazy_init_ran:
            self._lazy_init()
        if self.mixed_precision is not None:
            self._precision.widen()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.logger.forward_begins()

    def _lazy_init(self) -> None:
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    @not_compiled_itself
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.mixed_precision is not None:
            self._precision.narrow()
            inputs, kwargs = self._precision.cast((inputs, kwargs))
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    def _inside_ddp_forward(self) -> AbstractContextManager[None]:
        return active(self)

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return active_wrapper()

    def _clear_grad_buffer(self) -> None:
        """Let the gradients that are reduced late be views of their buffer."""
        for parameter, view in self._delayed:
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int]) -> Any:
        """Inputs for each device, split along `dim`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs moved to one device, in a list of one."""
        device = torch.device(self.device_type, device_id)
        return (moved_to(inputs, device),), (moved_to(kwargs, device),)

    def gather(self, outputs: Any, output_device: int) -> Any:
        """Outputs of several devices, joined along `dim`."""
        return gather(outputs, output_device, dim=self.dim)

    # Buffers

    def _assign_modules_buffers(self) -> None:
        """Note the module's buffers anew: a module may replace them between two forwards."""
        self.named_module_buffers = self._own(self.module.named_buffers())
        self.modules_buffers = list(self.named_module_buffers.values())

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Whether the next forward takes other ranks' buffers before it runs the module."""
        return self.will_sync_module_buffers() and not self._syncs_buffers_late()

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Whether it does so after it has run the module."""
        return self.will_sync_module_buffers() and self._syncs_buffers_late()

    def _syncs_buffers_late(self) -> bool:
        hook = getattr(self, "buffer_hook", None)
        return (
            hook is not None
            and hook.buffer_comm_hook_location == _BufferCommHookLocation.POST_FORWARD
        )

    def _check_and_sync_module_buffers(self) -> None:
        """On a joined rank: answer the others' synchronization of their buffers."""
        if self._check_sync_bufs_pre_fwd():
            self._sync_module_buffers(self._find_common_rank(self._distributed_rank, False))

    def _sync_module_buffers(self, src: int) -> None:
        if not hasattr(self, "buffer_hook"):
            self._default_broadcast_coalesced(authoritative_rank=src)
            return
        hook = self.buffer_hook.buffer_comm_hook
        futures = hook(self.buffer_hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            self.reducer.extra_futures.extend(futures)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        buffers = self.modules_buffers if bufs is None else bufs
        self._distributed_broadcast_coalesced(buffers, bucket_size, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int | None, authoritative_rank: int = 0
    ) -> None:
        broadcast_tensors(tensors, self.process_group, authoritative_rank)

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let `hook(state, named_buffers)` synchronize the buffers, before or after forward.

        It may return futures; they are awaited at the end of the backward.
        """
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        location = _BufferCommHookLocation[comm_hook_location.name]
        self.buffer_hook = _BufferCommHook(hook, state, location)

    # Comm hooks and optimizers

    def _check_comm_hook(self, hook: Any) -> None:
        check_comm_hook(hook, self.reducer.error)

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        raise self.reducer.error(err_msg, err_type)

    def _fire_reducer_autograd_hook(self, idx: int, *unused: Any) -> None:
        self.reducer.on_gradient(idx)

    def _set_comm_hook(self, hook: Callable, state: Any, name: str) -> None:
        if self.reducer.comm_hook is not None:
            raise self.reducer.error(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self._refuse_measured_plan("a communication hook, whose time it does not take")
        self.reducer.comm_hook = (hook, state)
        self.logger.figures["comm_hook"] = name

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

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP.") from error

    def _setup_in_backward_optimizers(self) -> None:
        """Take over from `apply_optimizer_in_backward`: step after the reduction, not before."""
        parameters = list(self._own(self.module.named_parameters()).values())
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
        self.reducer.optimizer_in_backward = True

    # Uneven inputs

    def _refuse_to_join(self) -> None:
        """Raise ValueError for settings that let the inputs decide what is sent."""
        for setting, is_set in (
            ("skip_all_reduce_unused_params", self.skip_all_reduce_unused_params),
            ("delay_all_reduce_named_params", bool(self._delayed)),
        ):
            if is_set:
                raise ValueError(
                    f"{setting} does not go with join(): a rank without inputs cannot know what "
                    "the others send. Leave one of the two out."
                )

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """On a joined rank: answer the reduction of each bucket, by zeros."""
        for future in [
            self.reducer.reduce(bucket) for bucket in self.reducer._get_zeros_like_grad_buckets()
        ]:
            future.wait()

    def _match_unused_params_allreduce(self) -> None:
        """On a joined rank: answer the search for unused parameters; none is used here."""
        nothing = [0] * len(self.reducer.parameters)
        used = torch.tensor(nothing, dtype=torch.int32, device=self.device)
        wait_for(dist.all_reduce(used, group=self.process_group, async_op=True))

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Take the model of the rank that joined last, who alone has taken every step."""
        self._authoritative_rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        state = self._own(self.module.named_parameters())
        if self.forward_sync_buffers:
            state |= self._own(self.module.named_buffers())
        broadcast_tensors(list(state.values()), self.process_group, self._authoritative_rank)

    # Settings

    def _set_static_graph(self) -> None:
        """Declare that every iteration uses the same parameters in the same way."""
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self.logger.iteration > 0:
            raise self.reducer.error(
                "_set_static_graph() should be called before training loop starts after "
                "DistributedDataParallel is constructed."
            )
        self.static_graph = True
        self._static_graph_delay_allreduce_enqueued = False
        self.reducer.expect_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so you do not "
                "need to set find_unused_parameters=true, just be sure these unused parameters "
                "will not change during training loop while calling `_set_static_graph`.",
                stacklevel=2,
            )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        self._ddp_sink_clone = val

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with other ranks, from the next forward on; the buckets are packed anew."""
        self._has_rebuilt_buckets = False
        self.reducer.start_over()
        if new_process_group is not dist.GroupMember.NON_GROUP_MEMBER:
            self.process_group = self.reducer.process_group = new_process_group

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

    def _get_parameters(self, m: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        for module in m.modules() if recurse else [m]:
            yield from module.parameters(recurse=False)

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return list(self._own(self.module.named_parameters()).values())

    @property
    def is_multi_device_module(self) -> bool:
        return len({parameter.device for parameter in self._module_parameters}) > 1

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _check_default_group(self) -> None:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor"
            )

    # Figures

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


_DTYPE_NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}


class _Log:
    """The figures of `_get_ddp_logging_data`; an iteration's are taken at the next forward."""

    _FULLY_SAMPLED = 10

    def __init__(self, ddp: Any):
        self.reducer = ddp.reducer
        self.iteration = 0
        self.sample_rate = 100
        self.sums: dict[str, int] = {}
        self.samples = 0
        self.figures: dict[str, Any] = {}
        self.initial_buckets = _bucket_bytes(ddp.reducer)

    def forward_begins(self) -> None:
        """Take the figures of the iteration that ended; count the one that begins."""
        if self._is_sampled(self.iteration) and self.iteration > 0:
            self._sample()
        self.reducer.times["forward_start"] = perf_counter_ns()
        self.iteration += 1

    def _is_sampled(self, iteration: int) -> bool:
        return iteration <= self._FULLY_SAMPLED or iteration % self.sample_rate == 0

    def _sample(self) -> None:
        times = self.reducer.times
        if "comm_end" not in times or "forward_start" not in times:
            return
        self.samples += 1
        spans = {
            "forward_compute_time": ("forward_start", "backward_start"),
            "backward_compute_time": ("backward_start", "compute_end"),
            "backward_comm_time": ("comm_start", "comm_end"),
            "backward_compute_comm_overlap_time": ("comm_start", "compute_end"),
        }
        for name, (start, end) in spans.items():
            span = times[end] - times[start]
            self.sums[name] = self.sums.get(name, 0) + span
            self.figures[name] = span
            self.figures[f"avg_{name}"] = self.sums[name] // self.samples
        self.figures |= {
            "iteration": self.iteration,
            "forward_compute_time_start": times["forward_start"],
            "backward_compute_time_start": times["backward_start"],
            "backward_compute_time_end": times["compute_end"],
            "backward_comm_time_start": times["comm_start"],
            "backward_comm_time_end": times["comm_end"],
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, self.reducer.order)),
            "num_buckets_reduced": self.reducer.reduced_buckets,
            "unused_parameter_size": sum(
                self.reducer.parameters[index].nbytes for index in self.reducer.unused
            ),
        }

    def snapshot(self, ddp: Any) -> dict[str, Any]:
        """Everything by name."""
        reducer = self.reducer
        dtypes = {p.dtype: None for p in reducer.parameters}
        environment = {
            "master_port": "MASTER_PORT",
            "master_addr": "MASTER_ADDR",
            "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
            "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
        }
        backend = ddp.process_group.name()
        if backend == "gloo":
            environment["gloo_socket_ifname"] = "GLOO_SOCKET_IFNAME"
            environment["gloo_device_transport"] = "GLOO_DEVICE_TRANSPORT"
            self.figures["gloo_num_threads"] = 2
        data = {
            "iteration": self.iteration,
            "world_size": ddp.process_group.size(),
            "rank": ddp.process_group.rank(),
            "module_name": type(ddp.module).__name__,
            "device_ids": ", ".join(map(str, ddp.device_ids or ())),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": int(ddp.forward_sync_buffers),
            "is_multi_device_module": int(ddp.is_multi_device_module),
            "has_sync_bn": int(any("SyncBatchNorm" in type(m).__name__ for m in ddp.modules())),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "static_graph": int(ddp.static_graph),
            "backend_name": backend,
            "dtypes": ", ".join(sorted(_DTYPE_NAMES.get(dtype, str(dtype)) for dtype in dtypes)),
            "total_parameter_size_bytes": sum(p.nbytes for p in reducer.parameters),
            "num_parameter_tensors": len(reducer.parameters),
            "bucket_sizes": self.initial_buckets,
            "has_rebuilt_buckets": int(reducer.rebuilt),
            "join_uneven_inputs": ddp._joins_uneven_inputs,
        }
        if reducer.rebuilt:
            data["rebuilt_bucket_sizes"] = _bucket_bytes(reducer)
            data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, bucket.indices)) for bucket in reducer.buckets
            )
        if reducer.last_error is not None:
            data |= {"has_error": 1, "error": reducer.last_error}
        data |= {key: os.environ.get(name, "N/A") for key, name in environment.items()}
        return data | self.figures


def _bucket_bytes(reducer: Any) -> str:
    return ", ".join(str(sum(p.nbytes for p in bucket.parameters)) for bucket in reducer.buckets)
