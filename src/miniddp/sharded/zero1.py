"""ZeRO-1: gradients are averaged as in DDP, and each rank keeps 1/W of the optimizer's state.

    model = MiniDDP(module)                                    # or torch's wrapper
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

Each rank's step updates its rows of each parameter, which are views. An all-gather then brings the
other rows. Cost for Ψ bytes of parameters: (W−1)/W·Ψ sent per step, beside DDP's 2(W−1)/W·Ψ.
Memory: the state of Ψ/W.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, which cuts one flat tensor into equal pieces; torch.distributed.optim
.ZeroRedundancyOptimizer, which deals out whole parameters. Rows are `fully_shard`'s division.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from miniddp.comm import this_group
from miniddp.sharded.sharding import gather_all, local_shard


class ZeroRedundancyOptimizer(Optimizer):
    """An optimizer of `optimizer_class` for this rank's rows of `params`.

    Args:
        params: parameters or groups of them, as for any optimizer, the same on every rank.
        optimizer_class: one that works element by element: SGD, Adam, AdamW, …
        process_group: the ranks that share the work; the default group when None.
        defaults: keywords of `optimizer_class`.

    `param_groups` are the user's: a scheduler changes them, and `step` hands the changes on.
    `state_dict` and `load_state_dict` are those of this rank's rows, for the same number of ranks;
    `miniddp.sharded.state` has those for any number.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ):
        super().__init__(params, defaults)
        self.group = this_group(process_group)
        self.shard_of: dict[Tensor, nn.Parameter] = {}
        groups = [{**group, "params": self.take(group["params"])} for group in self.param_groups]
        self.inner = optimizer_class(groups, **defaults)
        self.defaults = self.inner.defaults
        self._copy_options(self.inner, self)

    def take(self, parameters: list[Tensor]) -> list[nn.Parameter]:
        """This rank's rows of each parameter, from now on to be updated."""
        shards = self.make_shards(parameters)
        self.shard_of |= shards
        return list(shards.values())

    def make_shards(self, parameters: list[Tensor]) -> dict[Tensor, nn.Parameter]:
        """This rank's rows of each parameter."""
        return {parameter: local_shard(parameter, self.group) for parameter in parameters}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer."""
        super().add_param_group(param_group)
        if hasattr(self, "inner"):
            group = self.param_groups[-1]
            self.inner.add_param_group({**group, "params": self.take(group["params"])})

    @property
    def shards(self) -> list[nn.Parameter]:
        """What this rank's optimizer holds."""
        return list(self.shard_of.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's rows, then take the other ranks'."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.take_gradients()
        self._copy_options(self, self.inner)
        self.inner.step()
        trainable = [parameter for parameter in self.shard_of if parameter.requires_grad]
        by_device = sorted(trainable, key=lambda parameter: str(parameter.device))
        for _, parameters in groupby(by_device, key=lambda parameter: parameter.device):
            of_one = list(parameters)
            shards = [self.shard_of[parameter] for parameter in of_one]
            wholes = gather_all(shards, [shard.sharding for shard in shards])
            for parameter, whole in zip(of_one, wholes, strict=True):
                parameter.copy_(whole)
        return loss

    def take_gradients(self) -> None:
        """Give each shard its rows of the averaged gradient; none where there is none."""
        for parameter, shard in self.shard_of.items():
            gradient = parameter.grad
            shard.grad = None if gradient is None else shard.sharding.shard(gradient)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of the shards included."""
        super().zero_grad(set_to_none)
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's rows."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this rank's rows, saved by as many ranks.

        Raises ValueError if it is that of other rows.
        """
        for index, shard in enumerate(p for g in self.inner.param_groups for p in g["params"]):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.ndim and value.shape != shard.shape:
                    raise ValueError(
                        f"{name} has the shape {tuple(value.shape)}, and this rank's rows have "
                        f"{tuple(shard.shape)}: another number of ranks saved it. Save and load by "
                        "full_optimizer_state_dict and load_full_optimizer_state_dict"
                    )
        self.inner.load_state_dict(state_dict)
        self._copy_options(self.inner, self)

    @staticmethod
    def _copy_options(source: Optimizer, target: Optimizer) -> None:
        """Give `target` the options of `source`'s groups, such as learning rates."""
        for group, of_source in zip(target.param_groups, source.param_groups, strict=True):
            group.update({**of_source, "params": group["params"]})
