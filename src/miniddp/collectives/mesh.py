"""A grid of ranks with named dimensions, and collectives with gradients along one of them.

    mesh = Mesh(data=2, tensor=2)  # ranks 0 and 1 form a tensor group, 0 and 2 a data group

The backward of `sum` and `gather` adds up the gradients of all ranks of the group. So if every loss
term belongs to one rank, or is divided by the number of ranks that compute it, then each rank's
backward leaves a share of every gradient. `add_up`, over all dimensions along which a parameter has
copies, completes it. A dimension that the mesh does not have is one of size 1.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from miniddp.collectives.differentiable import all_gather, all_reduce


class Mesh:
    """Names of dimensions and their sizes, the last one varying fastest with the rank.

    Without dimensions it is a single process, and needs no process group. All ranks must create it.
    """

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        if sizes:
            names, shape = tuple(sizes), tuple(sizes.values())
            self._grid = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def size(self, dimension: str) -> int:
        """The number of ranks along `dimension`."""
        return self.sizes.get(dimension, 1)

    def index(self, dimension: str) -> int:
        """This rank's place along `dimension`, from 0."""
        return self._grid.get_local_rank(dimension) if dimension in self.sizes else 0

    def sum(self, tensor: Tensor, dimension: str) -> Tensor:
        """The sum of the ranks' tensors along `dimension`: an all-reduce, and one in backward."""
        if dimension not in self.sizes:
            return tensor
        return all_reduce(tensor, self._grid.get_group(dimension))

    def gather(self, tensor: Tensor, dimension: str) -> Tensor:
        """The ranks' tensors (n, …) along `dimension` as one (size · n, …).

        Costs an all-gather, and an all-reduce of as many bytes in backward.
        """
        if dimension not in self.sizes:
            return tensor
        return all_gather(tensor, self._grid.get_group(dimension))

    def add_up(self, gradient: Tensor, dimensions: Iterable[str]) -> None:
        """Replace `gradient` by its sum along each of `dimensions`: one all-reduce for each.

        Raises:
            TypeError: `dimensions` is a string; its letters would be taken for names.
        """
        if isinstance(dimensions, str):
            raise TypeError(f"dimensions is the string {dimensions!r}; pass [{dimensions!r}]")
        for dimension in dimensions:
            if dimension in self.sizes:
                dist.all_reduce(gradient, group=self._grid.get_group(dimension))
