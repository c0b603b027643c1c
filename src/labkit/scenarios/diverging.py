"""Ways in which replicas diverge although every loss goes through the wrapper.

Each cause is a change that torch's DDP accepts without a message. `drift` trains a small model on
the ranks and measures how far the replicas are apart.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Cause = Literal["nothing", "converted", "unfrozen", "loaded on rank 1", "step skipped"]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with learning rate 0.1."""
    return torch.optim.SGD(parameters, lr=0.1)


def replicas(
    rank: int, cause: Cause, steps: int, optimizer_of: MakeOptimizer = plain_sgd
) -> list[Tensor]:
    """This rank's weights after each step, flattened, as a function for `run_ranks`.

    Args:
        cause: one of

            - "nothing"
            - "converted": `.double()` after wrapping
            - "unfrozen": a parameter is frozen while the model is wrapped
            - "loaded on rank 1": rank 1 loads other weights after wrapping
            - "step skipped": rank 1 leaves out its second optimizer step
        optimizer_of: makes the optimizer from the parameters.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    module[0].weight.requires_grad_(cause != "unfrozen")
    wrapper = DistributedDataParallel(module)
    module[0].weight.requires_grad_(True)
    if cause == "converted":
        module.double()
    if cause == "loaded on rank 1" and rank == 1:
        module.load_state_dict({k: v + 0.1 for k, v in module.state_dict().items()})
    optimizer = optimizer_of(module.parameters())
    torch.manual_seed(10 + rank)
    copies = []
    for step in range(steps):
        x, y = (t.to(module[0].weight) for t in (torch.randn(4, 3), torch.randn(4, 1)))
        optimizer.zero_grad()
        (wrapper(x) - y).square().mean().backward()
        if not (cause == "step skipped" and rank == 1 and step == 1):
            optimizer.step()
        copies.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return copies


def drift(of_ranks: list[list[Tensor]]) -> list[float]:
    """For each step the largest difference of a weight between any two ranks."""
    steps = (torch.stack(copies) for copies in zip(*of_ranks, strict=True))
    return [(copies.amax(0) - copies.amin(0)).max().item() for copies in steps]
