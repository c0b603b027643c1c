"""ZeRO-1: gradients are averaged as in DDP, and each rank keeps 1/W of the optimizer's state.

    model = MiniDDP(module)                                    # or torch's wrapper
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

Each rank's step updates its slice of the parameters (`miniddp.sharded.slices`). An all-gather then
brings the other slices. Cost for Ψ bytes of parameters: (W−1)/W·Ψ sent per step, beside DDP's
2(W−1)/W·Ψ. Memory: the state of Ψ/W.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020; torch.distributed.optim.ZeroRedundancyOptimizer, which deals out whole parameters.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from miniddp.comm import this_group
from miniddp.sharded.slices import Piece, Slices


class ZeroRedundancyOptimizer(Optimizer):
    """An optimizer of `optimizer_class` for this rank's slice of `params`.

    Args:
        params: parameters or groups of them, as for any optimizer, the same on every rank.
        optimizer_class: one that works element by element: SGD, Adam, AdamW, …
        process_group: the ranks that share the work; the default group when None.
        defaults: keywords of `optimizer_class`.

    `param_groups` are the user's: a scheduler changes them, and `step` hands the changes on.
    `state_dict` and `load_state_dict` are those of this rank's slice, for the same number of ranks.
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
        self.slices = self.make_slices()
        shards: dict[int, list[nn.Parameter]] = {}
        group_of = {p: n for n, group in enumerate(self.param_groups) for p in group["params"]}
        for parameter, piece in self.pieces():
            shards.setdefault(group_of[parameter], []).append(piece.shard)
        self.inner = optimizer_class(
            [{**_options(g), "params": shards.get(n, [])} for n, g in enumerate(self.param_groups)],
            **defaults,
        )
        self.defaults = self.inner.defaults
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))

    def make_slices(self) -> list[Slices]:
        """One division per dtype and device."""
        everything = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        kinds = sorted(everything, key=_kind)
        return [Slices(list(of_kind), self.group) for _, of_kind in groupby(kinds, key=_kind)]

    def pieces(self) -> list[tuple[Tensor, Piece]]:
        """Each piece that this rank owns, with its parameter."""
        return [(s.parameters[piece.index], piece) for s in self.slices for piece in s.pieces]

    @property
    def shards(self) -> list[nn.Parameter]:
        """What this rank's optimizer holds."""
        return [piece.shard for _, piece in self.pieces()]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's slice, then take the other ranks'."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.take_gradients()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options(group))
        self.inner.step()
        for slices in self.slices:
            slices.gather()
        return loss

    def take_gradients(self) -> None:
        """Give each piece its part of the averaged gradient; none where there is none."""
        for parameter, piece in self.pieces():
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            piece.shard.grad = None if gradient is None else piece.of(gradient)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of the pieces included."""
        super().zero_grad(set_to_none)
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's slice."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this rank's slice, saved by as many ranks."""
        self.inner.load_state_dict(state_dict)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _kind(parameter: Tensor) -> tuple[str, str]:
    return str(parameter.dtype), str(parameter.device)
