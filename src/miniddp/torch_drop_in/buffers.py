"""Buffers, as torch's wrapper synchronizes them: from which rank, and before or after a forward.

A *buffer hook* may replace the broadcast of rank 0's buffers. With Join, the rank of the broadcast
is one that still has inputs. Source: the same names in torch/nn/parallel/distributed.py.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miniddp.ddp import MiniDDP
from miniddp.replicas import broadcast_tensors
from miniddp.torch_drop_in.join import highest_rank


class _BufferCommHookLocation(Enum):
    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class _BufferCommHook(NamedTuple):
    buffer_comm_hook: Callable
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: _BufferCommHookLocation


class BufferSync(MiniDDP):
    """The part of `DistributedDataParallel` that synchronizes buffers."""

    def _assign_modules_buffers(self) -> None:
        """Find the module's buffers again: a module may replace them between two forwards."""
        self.named_module_buffers = self.synced_buffers()
        self.modules_buffers = list(self.named_module_buffers.values())

    @property
    def forward_sync_buffers(self) -> bool:
        """Torch's new name of `broadcast_buffers`."""
        return self.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self.broadcast_buffers = value

    @torch.no_grad()
    def sync_buffers(self) -> None:
        # With Join rank 0 may have run out of data long ago.
        self._assign_modules_buffers()
        self._sync_module_buffers(highest_rank(self, True) if self._join_config.enable else 0)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronizes the buffers, before or after it runs the module."""
        return super()._check_sync_bufs_pre_fwd()

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers() and not self._syncs_buffers_late()

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Whether it does so after it has run the module."""
        return self.will_sync_module_buffers() and self._syncs_buffers_late()

    def _syncs_buffers_late(self) -> bool:
        hook, late = getattr(self, "buffer_hook", None), _BufferCommHookLocation.POST_FORWARD
        return hook is not None and hook.buffer_comm_hook_location == late

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
