"""Buffers, as torch's wrapper synchronizes them: from which rank, and before or after a forward.

A *buffer hook* may replace the broadcast of rank 0's buffers. With Join, the rank of the broadcast
is one that still has inputs. Source: the same names in torch/nn/parallel/distributed.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from miniddp.ddp import MiniDDP
from miniddp.replicas import broadcast_tensors
from miniddp.torch_drop_in.join import highest_rank


class BufferSync(MiniDDP):
    """The part of `DistributedDataParallel` that synchronizes buffers."""

    _buffer_hook: tuple[Callable, Any] | None = None  # with its state
    _syncs_buffers_late = False  # after the module has run

    @property
    def forward_sync_buffers(self) -> bool:
        """Torch's new name of `broadcast_buffers`."""
        return self.broadcast_buffers

    @torch.no_grad()
    def sync_buffers(self) -> None:
        # With Join rank 0 may have run out of data long ago.
        self.sync_buffers_from(highest_rank(self, True) if self._join_config.enable else 0)

    def sync_buffers_from(self, src: int) -> None:
        """Call the buffer hook, or else take the buffers of rank `src`."""
        named = self.synced_buffers()  # may be new ones
        self.modules_buffers = list(named.values())
        if self._buffer_hook is None:
            self._default_broadcast_coalesced(authoritative_rank=src)
            return
        hook, state = self._buffer_hook
        if (futures := hook(state, named)) is not None:
            self.reducer.extra_futures.extend(futures)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return super()._check_sync_bufs_pre_fwd() and not self._syncs_buffers_late

    def _check_sync_bufs_post_fwd(self) -> bool:
        return super()._check_sync_bufs_pre_fwd() and self._syncs_buffers_late

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        buffers = self.modules_buffers if bufs is None else bufs
        broadcast_tensors(buffers, self.process_group, authoritative_rank)

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = None,
    ) -> None:
        """Let `hook(state, named_buffers)` synchronize the buffers, before or after forward.

        It may return futures; they are awaited at the end of the backward.
        """
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self._buffer_hook = hook, state
        self._syncs_buffers_late = getattr(comm_hook_location, "name", "") != "PRE_FORWARD"
