"""MiniDDP: data parallelism around any module, with the everyday keywords of torch's wrapper.

Every rank holds a full copy of the module and its own part of the batch. After `backward()` each
parameter's gradient is the average over the ranks, so equal optimizers keep the copies equal.

1. *Construction.* The ranks verify that their models have the same form, then take rank 0's values.
2. *Forward.* Take rank 0's buffers, then call the module. A *synchronized* forward announces its
   backward to `miniddp.reducer`; one in `no_sync()` or without grad does not.

Rank 0 broadcasts the model at construction. It broadcasts the buffers again before the first
forward, and before every forward that follows a synchronized one. It broadcasts the rebuilt plan
once (step 6 in the docs of `miniddp.reducer`). Source: torch.nn.parallel.distributed.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp import errors
from miniddp.buckets import bucket_caps
from miniddp.comm import this_group
from miniddp.nested import find_tensors
from miniddp.reducer import Reducer
from miniddp.replicas import broadcast_tensors, verify_same_model
from miniddp.unused import DDPSink


def disable_dynamo(function: Callable, recursive: bool = True) -> Callable:
    """Keep torch.compile from compiling `function` and, if `recursive`, what it calls."""
    # Private, as in torch's optimizers: the public torch.compiler.disable loads Dynamo at once,
    # which would add a second to each `import miniddp`.
    return torch._disable_dynamo(function, recursive=recursive)


def is_wrapped(module: nn.Module) -> bool:
    """Whether `module` itself is a wrapper that averages gradients: one of ours, or torch's."""
    return isinstance(module, MiniDDP | nn.parallel.DistributedDataParallel)


def is_sharded(module: nn.Module) -> bool:
    """Whether a part of `module` says that it averages the gradients of its own shards."""
    return any(getattr(part, "averages_its_shards", False) for part in module.modules())


class MiniDDP(nn.Module):
    """Averages the gradients of `module` over the ranks of a process group, during backward.

    Args:
        module: the same on every rank; the gradients of its trainable parameters are averaged.
        process_group: the ranks that take part; the default group when None.
        broadcast_buffers: take rank 0's buffers, at construction and before forwards (the file's
            docstring says which).
        init_sync: verify and broadcast the model at construction.
        bucket_cap_mb: the buckets' size in MiB; when None, 25, but 1 for the one packed first.
        find_unused_parameters: for models in which a forward may leave parameters unused.
        gradient_as_bucket_view: gradients are views of the buckets, which saves one copy of them.

    Raises:
        RuntimeError: the ranks' models or settings differ, or nothing is trainable. With
            `init_sync`, every rank raises, even if only one has the cause.
        TypeError: `module` is no module, wrapped, or sharded already, or a keyword is unknown.
        ValueError: no process group, this rank is outside it, or the cap is invalid.
    """

    reducer_class: type[Reducer] = Reducer
    takes_wrappers = False  # whether a wrapper may be wrapped again, as torch allows
    _ddp_sink_clone = True  # whether outputs are copied when unused parameters are searched

    # 1. Construction ------------------------------------------------------------------------------

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        **unknown: Any,
    ):
        if unknown:
            raise TypeError(errors.unknown_keywords(list(unknown)))
        super().__init__()
        self.process_group = this_group(process_group)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.bucket_cap_mb = bucket_cap_mb
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = True  # False in no_sync()
        self.require_forward_param_sync = True  # whether the next forward takes rank 0's buffers

        self.verify_and_broadcast(init_sync)
        self.modules_buffers = list(self.synced_buffers().values())
        self.reducer = self.make_reducer()

    def verify_and_broadcast(self, init_sync: bool) -> None:
        """Check this rank's module and settings; with `init_sync`, compare and take rank 0's.

        A rank that finds a problem still takes part in the comparison, where every rank raises it:
        the others would otherwise wait for this rank forever.
        """
        state: dict[str, Tensor] = {}
        settings: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            wrapped = is_wrapped(self.module) and not self.takes_wrappers
            if not isinstance(self.module, nn.Module) or wrapped or is_sharded(self.module):
                raise TypeError(errors.cannot_be_wrapped(self.module))
            state = self.state_to_broadcast()
            self.resolve_settings()
            settings = self.common_settings()
        except Exception as error:
            problem = error
        if init_sync:
            verify_same_model(state, self.process_group, settings, problem)
            broadcast_tensors(list(state.values()), self.process_group, src=0)
        elif problem is not None:
            raise problem

    def resolve_settings(self) -> None:
        """Derive `caps` from the keywords. Raises if the module or a keyword is unusable."""
        self.caps = bucket_caps(self.bucket_cap_mb)
        if not any(parameter.requires_grad for parameter in self.synced_parameters().values()):
            raise RuntimeError(errors.nothing_to_average(type(self.module).__name__))

    def state_to_broadcast(self) -> dict[str, Tensor]:
        """What rank 0 sends at construction."""
        buffers = self.synced_buffers() if self.broadcast_buffers else {}
        return self.synced_parameters() | buffers

    def common_settings(self) -> dict[str, Any]:
        """The settings that decide which collectives run."""
        return {
            "find_unused_parameters": self.find_unused_parameters,
            "bucket caps in bytes": self.caps,
            "broadcast_buffers": self.broadcast_buffers,
        }

    def synced_parameters(self) -> dict[str, nn.Parameter]:
        """The module's parameters by name; those that require grad are reduced."""
        return dict(self.module.named_parameters())

    def synced_buffers(self) -> dict[str, Tensor]:
        """The module's buffers by name."""
        return dict(self.module.named_buffers())

    def make_reducer(self) -> Reducer:
        """The reducer of this wrapper's parameters."""
        named = {n: p for n, p in self.synced_parameters().items() if p.requires_grad}
        return self.reducer_class(
            list(named.values()),
            list(named),
            self.process_group,
            caps=self.caps,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            plan_at_once=self.find_unused_parameters,
        )

    # 2. Forward -----------------------------------------------------------------------------------

    @partial(disable_dynamo, recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output. Its backward is reduced, except in `no_sync()`.

        Raises RuntimeError if the previous backward lacks gradients.
        """
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        with self._inside_ddp_forward():
            output = self.module(*inputs, **kwargs)
        return self._post_forward(output)

    def _inside_ddp_forward(self) -> AbstractContextManager[Any]:
        """Entered while the module runs."""
        return nullcontext()

    @disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Rebuild the buckets if due, and synchronize the buffers."""
        if torch.is_grad_enabled():
            self.report_unsynchronized()
            self.reducer.rebuild_buckets()
        if self._check_sync_bufs_pre_fwd():
            self.sync_buffers()
        return inputs, kwargs

    @disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        """Announce the backward of `output` to the reducer."""
        searched = torch.is_grad_enabled() and self.reducer.find_unused_parameters
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = synced
        if synced:
            self.reducer.prepare_for_backward(find_tensors(output) if searched else ())
        elif torch.is_grad_enabled():
            self.reducer.prepare_for_local_backward()
        return DDPSink.pass_through(output, self._ddp_sink_clone) if searched else output

    def report_unsynchronized(self) -> None:
        """Warn once about a backward whose gradients stayed local."""
        if self.reducer.unsynchronized:
            self.reducer.unsynchronized = False
            text = errors.unsynchronized([self.reducer.rank])
            warnings.warn(text, stacklevel=errors.stacklevel_of_caller())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards in this block stay local and accumulate.

        The first synchronized backward afterwards reduces the sum. If an earlier forward still
        awaits its backward, the next backward is reduced, even inside the block.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        self.reducer.prepare_for_local_backward()
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a MiniDDP cannot be copied: copy or save its .module, and wrap the copy")

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Whether to take rank 0's buffers now."""
        synced = self.broadcast_buffers and self.require_forward_param_sync
        return synced and len(self.modules_buffers) > 0

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Take rank 0's buffers."""
        self.modules_buffers = list(self.synced_buffers().values())  # may be new ones
        broadcast_tensors(self.modules_buffers, self.process_group, src=0)
