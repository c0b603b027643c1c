"""Samples that come from no data loader, marked by the script: `ddp_doctor.batch`."""

import sys
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ddp_doctor.certificate.plan import LATER
from ddp_doctor.certificate.samples import MARKED, alike
from ddp_doctor.certificate.steps import Steps

T = TypeVar("T")
_certified: list["Marks"] = []  # one in a process of a certificate, else none


def batch(value: T) -> T:
    """Mark a batch that comes from no data loader; returns it.

    `value` is a tensor, or a tuple, list, or dict with tensors. Each of them has one sample per
    row; sizes and counts have to be taken from what is returned. Only `--certify` looks at marks,
    and only where gradients are on. Then it takes nothing but marked batches and those of data
    loaders for samples. In any other run, and with one process, `value` itself is returned.
    """
    if not _certified or not torch.is_grad_enabled():
        return value
    frame = sys._getframe(1)
    place = (frame.f_code.co_filename, frame.f_lineno)
    leaves, tree = tree_flatten(value)
    return tree_unflatten([_certified[0].planned(place, *one) for one in enumerate(leaves)], tree)


class Marks:
    """Writes down what is marked in the first step; then each mark gets what the plan says."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.turns: dict[Any, int] = {}
        steps.ends.append(self.turns.clear)
        _certified.append(self)

    def planned(self, place: tuple[str, int], number: int, value: Any) -> Any:
        """What to use instead of the tensor with this number at this place."""
        if not isinstance(value, Tensor) or not value.dim() or self.steps.now == LATER:
            return value
        site = (*place, number, MARKED)
        turn = self.turns.get(site, 0)
        self.turns[site] = turn + 1
        handed = self.steps.handed
        if handed is None:
            self.steps.recorded.samples[site, turn] = value.detach().clone()
            return value
        wanted = handed.rows(self.steps.now, (site, turn))
        if wanted is None:
            self.steps.unjoined.append(f"{place[0]}:{place[1]}")
            return value
        return value if alike([wanted, value]) else wanted.clone()
