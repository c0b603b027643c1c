"""Sparse gradients: an embedding with `sparse=True` travels alone, as indices and values.

Only the rows that a batch used have a gradient. The bucket's buffer is the gradient itself, so
nothing is copied. Cost: one all-reduce per such parameter and backward, of the rows in use.
Source: mark_variable_ready_sparse in torch/csrc/distributed/c10d/reducer.cpp.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from miniddp.buckets import ParameterSize
from miniddp.torch_drop_in.fast import Part, PartedBucket


def each_alone(sizes: Sequence[ParameterSize], sparse: Sequence[bool]) -> list[ParameterSize]:
    """`sizes`, where each parameter with a sparse gradient is of a kind of its own."""
    return [
        size._replace(kind=("sparse", index)) if sparse[index] else size
        for index, size in enumerate(sizes)
    ]


class SparseBucket(PartedBucket):
    """One parameter with a sparse gradient (an embedding): the gradient itself is the buffer."""

    def allocate(self) -> None:
        self.offsets, self.buffer, self.views = [0, 0], self.parameters[0].new_empty(0), []
        self.divide()

    def record_stream(self, gradient: Tensor, stream: torch.cuda.Stream) -> None:
        # Tensor.record_stream accepts no sparse tensor; the public names, no uncoalesced one.
        for part in (gradient._indices(), gradient._values()):
            part.record_stream(stream)

    def copy_part_in(self, part: Part, divisor: int) -> list[int]:
        """Take the gradient as the buffer. Returns its parameter's index if it is dense."""
        gradient = self.parameters[0].grad
        if gradient is None:
            gradient = self.zeros()
        if not gradient.is_sparse:
            return part.indices
        self.buffer = gradient.div_(divisor)
        return []

    def zeros(self) -> Tensor:
        """The gradient of a rank that used no row."""
        return torch.zeros_like(self.parameters[0], layout=torch.sparse_coo)

    def copy_out(self, slots: Sequence[int]) -> list[int]:
        if slots:
            # Mixed precision has restored the parameter by now.
            self.parameters[0].grad = self.buffer.to(self.parameters[0].dtype)
        return []
