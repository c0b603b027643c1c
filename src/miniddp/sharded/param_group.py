"""The parameters that `fully_shard` moves together, and the two messages that move them.

*All-gather*, before forward and before backward: each rank sends its rows, and every rank has the
whole parameters. *Reduce-scatter*, after backward: each rank sends whole gradients, and receives
the sum of its own rows.

**`Reduction` is where `fully_shard` divides a gradient**: by the number of ranks, while it copies
the gradient into the message. Source: torch's _fsdp_param_group.py and _fsdp_collectives.py, which
let NCCL divide (AVG).
"""

from collections.abc import Sequence
from enum import Enum, auto
from hashlib import sha256
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from miniddp.comm import wait_for
from miniddp.sharded.param import FSDPParam, ShardedParam
from miniddp.sharded.sharding import all_gather_single, reduce_scatter_single


class ShardedState(Enum):
    """Which form of the parameters the modules have."""

    SHARDED = auto()
    # An all-gather has been launched; the modules still have the sharded parameters.
    GATHERING = auto()
    UNSHARDED = auto()


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
        replicas: dist.ProcessGroup | None,
    ):
        self.params, self.group, self.replicas = list(params), group, replicas
        self.sharded_state = ShardedState.SHARDED
        self.requires_gradient_sync = True
        self.gradient_divide_factor: float | None = None
        self.set_name("")

    def set_name(self, name: str) -> None:
        """Name the group's module. Each all-gather begins with a hash of the name."""
        self.name, self.label = name, [*sha256(name.encode()).digest()[:8]]

    @torch.no_grad()
    def unshard(self) -> None:
        """Launch the all-gather, unless the parameters are whole or on their way."""
        if self.sharded_state is not ShardedState.SHARDED or not self.params:
            return
        with record_function("miniddp.all_gather"):
            lines = [param.bytes_to_gather() for param in self.params]
            line = torch.cat([lines[0].new_tensor(self.label), *lines])
            self.gathered = line.new_empty(self.group.size(), line.numel())
            self.work = all_gather_single(
                self.gathered.view(-1), line, group=self.group, async_op=True
            )
        self.sharded_state = ShardedState.GATHERING

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Wait for the all-gather and let the modules have the whole parameters."""
        if self.sharded_state is ShardedState.GATHERING:
            with record_function("miniddp.wait"):
                wait_for(self.work)
            sizes = [len(self.label), *(param.nbytes for param in self.params)]
            labels, *columns = self.gathered.split(sizes, dim=1)
            self.sharded_state = ShardedState.SHARDED
            self.check_labels(labels)
            with record_function("miniddp.copy_out"):
                for param, column in zip(self.params, columns, strict=True):
                    param.to_unsharded(column)
            del self.gathered, self.work
            self.sharded_state = ShardedState.UNSHARDED

    def check_labels(self, labels: Tensor) -> None:
        """Raise RuntimeError if other ranks gather another group.

        Not on a GPU: the CPU, which runs ahead of it, would have to wait for the message.
        """
        if labels.is_cuda or bool((labels == labels[self.group.rank()]).all()):
            return
        raise RuntimeError(
            f"Rank {self.group.rank()} gathers the parameters of {self.name}, and another rank "
            "those of another module. Every rank must run the same sharded modules in the same "
            "order: call fully_shard only on the module that chooses between them"
        )

    def reshard(self) -> None:
        """Free the whole parameters. A launched all-gather is awaited first."""
        self.wait_for_unshard()
        if self.sharded_state is ShardedState.UNSHARDED:
            for param in self.params:
                param.to_sharded()
            self.sharded_state = ShardedState.SHARDED

    def has_gradient(self) -> bool:
        """Whether a gradient of this rank waits to be reduced."""
        return any(param.has_gradient() for param in self.params)

    @torch.no_grad()
    def reduce(self) -> list["Reduction"]:
        """Launch the reduction of all gradients: one message per dtype, usually one."""
        # One may have been frozen since a backward that was not synchronized.
        every = [p for p in self.params if p.sharded_param.requires_grad or p.has_gradient()]
        by_dtype = sorted(every, key=lambda param: str(param.reduce_dtype))
        replicas = 1 if self.replicas is None else self.replicas.size()
        divisor = self.gradient_divide_factor or self.group.size() * replicas
        # As in torch: only a sum of float16 may overflow. Later, there is 1/W as much to divide.
        return [
            Reduction(list(params), self.group, self.replicas, divisor, dtype is torch.float16)
            for dtype, params in groupby(by_dtype, key=lambda param: param.reduce_dtype)
        ]


class Reduction:
    """Gradients on their way: to the ranks that own their rows, and then to the replicas.

    A parameter without a gradient on this rank counts as zeros. The end of each line counts the
    ranks that have a gradient. Where none has one, none is written, because zeros would let
    momentum and weight decay move the parameter.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        divisor: float,
        divide_first: bool,
    ):
        self.params, self.replicas = params, replicas
        self.divisor, self.divide_first = divisor, divide_first
        self.sizes = [*(param.sharding.padded for param in params), len(params)]
        with record_function("miniddp.copy_in"):
            self.message = params[0].sharded_param.new_empty(
                (group.size(), sum(self.sizes)), dtype=params[0].reduce_dtype
            )
            *columns, exists = self.message.split(self.sizes, dim=1)
            for index, (param, column) in enumerate(zip(params, columns, strict=True)):
                exists[:, index] = param.has_gradient()
                if param.has_gradient():
                    column.copy_(param.sharding.table(param.take_gradient()))
                    if self.divide_first:
                        column.div_(divisor)
                else:
                    column.zero_()
        with record_function("miniddp.launch"):
            self.line = self.message.new_empty(sum(self.sizes))
            self.work = reduce_scatter_single(
                self.line, self.message.view(-1), group=group, async_op=True
            )

    def free(self) -> None:
        """Wait for this rank's rows, and free the message. With HSDP, add up the replicas' rows."""
        if self.message is not None:
            with record_function("miniddp.wait"):
                wait_for(self.work)
            self.work = self.message = None
            if self.replicas is not None:
                self.work = dist.all_reduce(self.line, group=self.replicas, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and add each rank's rows to the gradients of its sharded parameters."""
        self.free()
        if self.work is not None:
            with record_function("miniddp.wait"):
                wait_for(self.work)
        *lines, exists = self.line.split(self.sizes)
        for param, line, anywhere in zip(self.params, lines, (exists != 0).tolist(), strict=True):
            if anywhere:
                param.accumulate_sharded(line if self.divide_first else line.div_(self.divisor))
