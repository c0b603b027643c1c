"""One weight's gradient on each of four devices: parts under DataParallel, wholes under DDP."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from labkit.launch.ranks import run_ranks
from labkit.scenarios.sum_and_average import batches, seeded_model

DEVICES = 4
BATCH = 16


class Shares(NamedTuple):
    """The gradient of one element of the last bias.

    `parts`: per device, of the mean loss over all samples. `wholes`: per rank, of the mean loss
    over its own samples. `seen_by_parallel` and `seen_by_ddp`: what an optimizer gets.
    """

    parts: list[float]
    wholes: list[float]
    seen_by_parallel: float
    seen_by_ddp: float


def parts_and_wholes(data: TensorDataset) -> Shares:
    """Measure both on one batch of 16 samples. Starts four ranks."""
    x, y = next(iter(batches(data, BATCH)))
    parts, seen_by_parallel = _under_data_parallel(x, y)
    of_ranks = run_ranks(_under_ddp, DEVICES, x, y, device="cpu")
    wholes, averages = zip(*of_ranks, strict=True)
    return Shares(parts, list(wholes), seen_by_parallel, averages[0])


def _under_data_parallel(x: Tensor, y: Tensor) -> tuple[list[float], float]:
    # A replica's weights are differentiable copies of the model's, as in torch.nn.DataParallel.
    model = seeded_model()
    replicas = [{k: p.clone() for k, p in model.named_parameters()} for _ in range(DEVICES)]
    for replica in replicas:
        replica["2.bias"].retain_grad()
    pairs = zip(replicas, x.chunk(DEVICES), strict=True)
    outputs = [functional_call(model, replica, chunk) for replica, chunk in pairs]
    F.cross_entropy(torch.cat(outputs), y).backward()
    return [_element(r["2.bias"].grad) for r in replicas], _element(model[2].bias.grad)


def _under_ddp(rank: int, x: Tensor, y: Tensor) -> tuple[float, float]:
    model = seeded_model()
    ddp = DistributedDataParallel(model)
    wholes: list[float] = []
    # A hook on a parameter sees this rank's gradient, before the average.
    model[2].bias.register_hook(lambda gradient: wholes.append(_element(gradient)))
    F.cross_entropy(ddp(x.chunk(DEVICES)[rank]), y.chunk(DEVICES)[rank]).backward()
    return wholes[0], _element(model[2].bias.grad)


def _element(bias: Tensor) -> float:
    return bias[2].item()
