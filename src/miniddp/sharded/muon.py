"""Muon on sharded parameters: a step needs whole averaged matrices, and each rank has rows.

Muon replaces the momentum of a gradient, a matrix M, by an approximation of U Vᵀ, where M = U S Vᵀ.
Momentum is linear, so each rank keeps it for its own rows. The orthogonalization is not linear. It
has to see the whole matrix; here are two ways to that, and a wrong one:

==========  =======================================  ========================  ====================
`way`       what is done                             bytes sent per matrix     matrices per rank
==========  =======================================  ========================  ====================
"gather"    every rank gathers every matrix          (W−1)/W of it             all
"owner"     each matrix goes to one rank, and its    2(W−1)/W of it, together  1/W of them
            result back to the owners of the rows
"shard"     each rank orthogonalizes its own rows:   none                      all, 1/W of the rows
            another update, which depends on W
==========  =======================================  ========================  ====================

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; its
distributed form in modded-nanogpt; torch.optim.Muon, whose arithmetic this is.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from miniddp.sharded.sharding import Sharding

Way = Literal["gather", "owner", "shard"]


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """An approximation of U Vᵀ for `matrix` = U S Vᵀ, in bfloat16.

    Costs three matrix products per step, on the matrix turned so that it is wide. The singular
    values of the result lie between about 0.5 and 1.5.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class ShardedMuon(Optimizer):
    """Muon for matrices that `fully_shard` has divided.

    Args:
        params: sharded parameters of two dimensions. Give all others to AdamW.
        way: how the whole matrices are found, see above.
        lr, weight_decay, momentum, nesterov: as in torch.optim.Muon.

    Raises ValueError for other parameters, and for another `way`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        way: Way = "gather",
    ):
        if way not in ("gather", "owner", "shard"):
            raise ValueError(f'way must be "gather", "owner", or "shard", got {way!r}')
        self.way = way
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, {**defaults, "nesterov": nesterov})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2 or not hasattr(parameter, "sharding"):
                    raise ValueError(
                        "ShardedMuon takes sharded matrices, and found a parameter of shape "
                        f"{tuple(parameter.shape)}: shard it first, or give it to AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's rows. Every rank must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            momenta = [self._momentum(p, group["momentum"], group["nesterov"]) for p in parameters]
            ways = {"gather": _gather, "owner": _on_owner, "shard": _shard}
            updates = ways[self.way](momenta, [p.sharding for p in parameters])
            for parameter, update in zip(parameters, updates, strict=True):
                rows, columns = parameter.sharding.size
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))
        return loss

    def _momentum(self, parameter: nn.Parameter, momentum: float, nesterov: bool) -> Tensor:
        """This rank's rows of the matrix to orthogonalize."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum) if nesterov else buffer


def _gather(momenta: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """Every rank orthogonalizes every whole matrix, and keeps its rows."""
    return [
        sharding.shard(newton_schulz(sharding.gather(rows)))
        for rows, sharding in zip(momenta, shardings, strict=True)
    ]


def _on_owner(momenta: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """Rank i mod W, the owner of matrix i, orthogonalizes it. In turns: this saves no time."""
    updates = []
    for index, (rows, sharding) in enumerate(zip(momenta, shardings, strict=True)):
        group, owner = sharding.group, index % sharding.group.size()
        chunk = sharding.pad(rows, rows.dtype)
        chunks = None  # on the owner: one per rank
        if group.rank() == owner:
            chunks = list(chunk.new_empty(group.size(), chunk.numel()))
        # 1. The owner receives the other ranks' rows.
        dist.gather(chunk, chunks, group=group, group_dst=owner)
        # 2. It orthogonalizes the whole matrix.
        if chunks is not None:
            whole = newton_schulz(sharding.from_chunks(torch.stack(chunks)))
            chunks = list(sharding.to_chunks(whole.to(rows.dtype)))
        # 3. Every rank receives its rows of the result.
        dist.scatter(chunk, chunks, group=group, group_src=owner)
        updates.append(sharding.unpad(chunk))
    return updates


def _shard(momenta: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """The wrong way: rows of U Vᵀ are not U Vᵀ of rows."""
    return [newton_schulz(rows) if rows.numel() else rows for rows in momenta]
