"""Synchronize every H steps: local SGD averages weights, DiLoCo takes an outer step.

    optimizer = DiLoCo(torch.optim.AdamW(model.parameters()), every=64)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()     # local: the model is in no wrapper
        optimizer.step()

Between two synchronizations each rank trains alone. Then its weights θ_r have moved away from the
common weights θ. *Local SGD* goes on from the average of θ_r. *DiLoCo* takes θ − average of θ_r for
a gradient, and an outer optimizer, SGD with Nesterov momentum, applies it to θ. The sign is easily
mistaken: an optimizer subtracts its gradient, so the difference must point away from progress.

Neither is the gradient of the full batch: gradients of a later local step are taken at other
weights. With H = 1, inner SGD, an outer learning rate of 1, and no outer momentum both are DDP up
to rounding. The state of inner optimizers stays on its rank; it describes the path of that rank.
Synchronize before you evaluate or save.

Cost: one all-reduce of the weights per H steps, 2(W−1)/W/H bytes per byte of weights and step. With
DiLoCo, two more copies of the weights. Sources: Stich, "Local SGD Converges Fast and Communicates
Little", ICLR 2019; Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models", 2023.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from miniddp.comm import this_group
from miniddp.replicas import chunks_of


class LocalSGD:
    """An optimizer whose ranks take their average weights after every `every` steps.

    Args:
        inner: each rank's own optimizer, of parameters that are equal on all ranks at the start.
        every: H, at least 1.
        process_group: the ranks; the default group when None.

    Raises ValueError if `every` is less than 1. It is no `torch.optim.Optimizer`: give a scheduler
    the inner one.
    """

    def __init__(
        self, inner: Optimizer, every: int, process_group: dist.ProcessGroup | None = None
    ):
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self.inner, self.every = inner, every
        self.process_group = this_group(process_group)
        self.steps = 0
        self.parameters = [p for group in inner.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an inner step, and synchronize if it is the last of `every`.

        Every rank must take the same number of steps.
        """
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.steps += 1
        if self.steps % self.every == 0:
            self.synchronize()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs, besides its weights, to go on from any step."""
        return {"inner": self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this rank's `state_dict` returned."""
        self.inner.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]

    @torch.no_grad()
    def synchronize(self) -> None:
        """Replace every rank's weights by their average."""
        average(self.parameters, self.process_group)


class DiLoCo(LocalSGD):
    """`LocalSGD` with an outer step: SGD on the ranks' average movement.

    Args:
        inner, every, process_group: as in `LocalSGD`.
        lr, momentum: of the outer SGD.
        nesterov: whether its momentum is Nesterov's.
    """

    def __init__(
        self,
        inner: Optimizer,
        every: int,
        process_group: dist.ProcessGroup | None = None,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
    ):
        super().__init__(inner, every, process_group)
        self.common = [p.detach().clone() for p in self.parameters]
        nesterov = nesterov and momentum > 0
        self.outer = SGD(self.common, lr=lr, momentum=momentum, nesterov=nesterov)

    def state_dict(self) -> dict[str, Any]:
        outer = {"outer": self.outer.state_dict(), "common": self.common}
        return super().state_dict() | outer

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.outer.load_state_dict(state_dict["outer"])
        for common, saved in zip(self.common, state_dict["common"], strict=True):
            common.copy_(saved)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Step the common weights by the average movement, and let every rank go on from there."""
        for common, parameter in zip(self.common, self.parameters, strict=True):
            common.grad = common - parameter
        average([common.grad for common in self.common], self.process_group)
        self.outer.step()
        self.outer.zero_grad()
        for common, parameter in zip(self.common, self.parameters, strict=True):
            parameter.copy_(common)


def average(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace `tensors` by their averages over the ranks: few all-reduces per dtype and device."""
    for chunk in chunks_of(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk]) / group.size()
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in chunk])
        for tensor, part in zip(chunk, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
