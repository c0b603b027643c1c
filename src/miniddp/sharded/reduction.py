"""The reduction of gradients to the ranks that hold their rows: a reduce-scatter.

**This file is where `fully_shard` and ZeRO-2 divide a gradient**: by the number of ranks, in
`copy_in` before the sum, or in `finish` after it, when 1/W as much is left to divide. Source:
foreach_reduce in torch's _fsdp_collectives.py, which lets NCCL divide (AVG).
"""

from collections.abc import Sequence
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp.comm import wait_for
from miniddp.sharded.param import ShardedParam
from miniddp.sharded.sharding import reduce_scatter_single


class Reduction:
    """Gradients on their way: to the ranks that hold their rows, and then to the replicas.

    Call `copy_in`, `launch`, `wait`, and `finish` on every rank. `wait_for_reduce_scatter` frees
    the message earlier and, with HSDP, starts the all-reduce.

    A parameter without a gradient on this rank counts as zeros. The end of each rank's chunk counts
    the ranks that have a gradient. Where none has one, none is written, because zeros would let
    momentum and weight decay move the parameter.

    Args:
        params: of one `reduce_dtype`, in an order that is the same on every rank.
        group: the ranks that divide them.
        replicas: with HSDP, the ranks that hold the same rows; otherwise None.
        divisor: the sum over all ranks is divided by it.
        divide_first: divide before the sum, which could overflow in float16.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        divisor: float,
        divide_first: bool,
    ):
        self.params, self.group, self.replicas = params, group, replicas
        self.divisor, self.divide_first = divisor, divide_first
        self.here: list[bool] = []  # which parameters have a gradient on this rank
        self.sizes = [*(param.sharding.chunk_numel for param in params), len(params)]
        self.input: Tensor | None = None  # of the reduce-scatter: a chunk for each rank
        self.output: Tensor  # this rank's chunk of the sum
        self.partial: Tensor | None = None  # that of earlier backwards, added before the all-reduce
        self.work: dist.Work | None = None

    @torch.no_grad()
    def copy_in(self) -> None:
        """Copy the gradients into the message, and forget them."""
        first = self.params[0]
        shape = (self.group.size(), sum(self.sizes))
        self.input = first.sharded_param.new_empty(shape, dtype=first.reduce_dtype)
        *columns, exists = self.input.split(self.sizes, dim=1)
        self.here = [param.has_gradient() for param in self.params]
        for index, (param, column) in enumerate(zip(self.params, columns, strict=True)):
            exists[:, index] = self.here[index]
            if self.here[index]:
                column.copy_(param.sharding.to_chunks(param.take_gradient()))
                if self.divide_first:
                    column.div_(self.divisor)
            else:
                column.zero_()

    def launch(self) -> None:
        """Launch the reduce-scatter."""
        self.output = self.input.new_empty(sum(self.sizes))
        self.work = reduce_scatter_single(
            self.output, self.input.view(-1), group=self.group, async_op=True
        )

    def wait_for_reduce_scatter(self) -> None:
        """Wait for this rank's rows, and free the message. With HSDP, add up the replicas' rows.

        Safe to call more than once.
        """
        if self.input is None:
            return
        wait_for(self.work)
        self.work = self.input = None
        if self.partial is not None:
            self.output += self.partial
        if self.replicas is not None:
            self.work = dist.all_reduce(self.output, group=self.replicas, async_op=True)

    def wait(self) -> None:
        """Wait for all of it."""
        self.wait_for_reduce_scatter()
        if self.work is not None:
            wait_for(self.work)
            self.work = None

    @torch.no_grad()
    def finish(self) -> None:
        """Add this rank's rows of the average to its sharded parameters' gradients."""
        *chunks, exists = self.output.split(self.sizes)
        # Asked for only if it is needed: on a GPU, the CPU would have to wait for the message.
        anywhere = self.here if all(self.here) else (exists != 0).tolist()
        for param, chunk in compress(zip(self.params, chunks, strict=True), anywhere):
            param.accumulate_sharded(chunk if self.divide_first else chunk.div_(self.divisor))
