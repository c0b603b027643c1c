"""The parameters that `fully_shard` moves together, and the two messages that move them.

*All-gather*, before forward and before backward: each rank sends its rows, and every rank has the
whole parameters. *Reduce-scatter*, after backward: each rank sends whole gradients, and receives
the sum of its own rows (`miniddp.sharded.reduction`).

A profile shows the ranges miniddp.all_gather, .wait, .copy_out, .copy_in, and .reduce_scatter, each
with the module's name. Source: torch's _fsdp_param_group.py and _fsdp_collectives.py.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from miniddp.comm import wait_for
from miniddp.sharded.param import FSDPParam
from miniddp.sharded.reduction import Reduction
from miniddp.sharded.sharding import all_gather_single


class ShardedState(Enum):
    """Which form of the parameters the modules have."""

    # This rank's rows: 1/W of the memory. The optimizer steps in this state.
    SHARDED = auto()
    # An all-gather has been launched; the modules still have the sharded parameters.
    GATHERING = auto()
    # The whole parameters, beside this rank's rows: for forward and backward.
    UNSHARDED = auto()


CALLS: Counter[str] = Counter()  # of `fully_shard`, by the process group that all its ranks share


class FSDPParamGroup:
    """The parameters of one call of `fully_shard`.

    Args:
        params: in an order that is the same on every rank.
        group: the ranks that divide them.
        replicas: with HSDP, the ranks that hold the same rows; otherwise None.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None = None,
    ):
        self.params, self.group, self.replicas = list(params), group, replicas
        self.sharded_state = ShardedState.SHARDED
        self.requires_gradient_sync = self.requires_all_reduce = True
        self.partial: dict[torch.dtype, Tensor] = {}  # this replica's sums, not yet all-reduced
        self.gradient_divide_factor: float | None = None
        self.reductions: list[Reduction] = []  # under way
        self.name = ""  # of the module, given by the first forward
        self.number = CALLS[group.group_name]  # each all-gather begins with it
        CALLS[group.group_name] += 1

    def profiled(self, phase: str) -> record_function:
        """A profiler range for one phase of this group."""
        return record_function(f"miniddp.{phase} ({self.name})")

    # 1. All-gather --------------------------------------------------------------------------------

    @torch.no_grad()
    def unshard(self) -> None:
        """Launch the all-gather, unless the parameters are whole or on their way."""
        if self.sharded_state is not ShardedState.SHARDED or not self.params:
            return
        with self.profiled("all_gather"):
            inputs = [param.all_gather_input() for param in self.params]
            label = inputs[0].new_full((1,), self.number, dtype=torch.int64).view(torch.uint8)
            chunk = torch.cat([label, *inputs])
            self.gathered = chunk.new_empty(self.group.size(), chunk.numel())
            self.work = all_gather_single(
                self.gathered.view(-1), chunk, group=self.group, async_op=True
            )
        self.sharded_state = ShardedState.GATHERING

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Wait for the all-gather and let the modules have the whole parameters."""
        if self.sharded_state is ShardedState.GATHERING:
            with self.profiled("wait"):
                wait_for(self.work)
            sizes = [torch.int64.itemsize]  # of the label, then of a rank's rows of each parameter
            sizes += [p.sharding.chunk_numel * p.all_gather_output.itemsize for p in self.params]
            labels, *outputs = self.gathered.split(sizes, dim=1)
            self.sharded_state = ShardedState.SHARDED
            # Not on a GPU: the CPU, which runs ahead of it, would have to wait for the message.
            if not labels.is_cuda and bool((labels != labels[self.group.rank()]).any()):
                raise self.other_ranks_gather_another()
            with self.profiled("copy_out"):
                for param, output in zip(self.params, outputs, strict=True):
                    param.to_unsharded(output)
            del self.gathered, self.work
            self.sharded_state = ShardedState.UNSHARDED

    def other_ranks_gather_another(self) -> RuntimeError:
        """The error for groups that run in different orders."""
        return RuntimeError(
            f"Rank {self.group.rank()} is all-gathering {self.name} while another rank is "
            "all-gathering a different module. Every rank must run the same sharded modules in the "
            "same order: call fully_shard only on the module that chooses between them"
        )

    def reshard(self) -> None:
        """Free the whole parameters. A launched all-gather is awaited first."""
        self.wait_for_unshard()
        if self.sharded_state is ShardedState.UNSHARDED:
            for param in self.params:
                param.to_sharded()
            self.sharded_state = ShardedState.SHARDED

    # 2. Reduce-scatter ----------------------------------------------------------------------------

    def has_gradient(self) -> bool:
        """Whether a gradient of this rank waits to be reduced."""
        return any(param.has_gradient() for param in self.params)

    def launch_reduce_scatter(self) -> None:
        """Launch the reduction of all gradients: one message per dtype, usually one."""
        by_dtype: dict[torch.dtype, list[FSDPParam]] = {}
        for param in self.params:
            # One may have been frozen since a backward that was not synchronized.
            if param.sharded_param.requires_grad or param.has_gradient():
                by_dtype.setdefault(param.reduce_dtype, []).append(param)
        replicas = 1 if self.replicas is None else self.replicas.size()
        divisor = self.gradient_divide_factor or self.group.size() * replicas
        for dtype, params in sorted(by_dtype.items(), key=lambda item: str(item[0])):
            # As in torch: only a sum of float16 may overflow. Later, there is less to divide.
            first = dtype is torch.float16
            to = self.replicas if self.requires_all_reduce else None
            reduction = Reduction(params, self.group, to, divisor, first)
            reduction.partial = self.partial.pop(dtype, None)
            with self.profiled("copy_in"):
                reduction.copy_in()
            with self.profiled("reduce_scatter"):
                reduction.launch()
            self.reductions.append(reduction)

    def wait_for_reduce_scatter(self) -> None:
        """Wait for this rank's rows, and free the messages. Safe to call more than once."""
        for reduction in self.reductions:
            if reduction.input is not None:
                with self.profiled("wait"):
                    reduction.wait_for_reduce_scatter()

    def finish_reduction(self) -> None:
        """Wait, and add the averages to the gradients of the sharded parameters."""
        for reduction in self.reductions:
            with self.profiled("wait"):
                reduction.wait()
            if reduction.replicas is self.replicas:
                reduction.finish()
            else:
                self.partial[reduction.output.dtype] = reduction.output
        self.reductions = []
