"""For by_hand_or_ddp.ipynb: two steps that tell strategies apart.

A *strategy* is a pair `(wrap, average)`: `wrap(model)` returns what is called for the
forward, and `average(model)` runs after backward. By hand, `wrap` returns the model
itself; DDP's `average` does nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from labkit.launch.ranks import run_ranks

Strategy = tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], object]]


class TwoHeads(nn.Module):
    """A shared layer and two heads. `both=False` leaves the second head out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: Tensor, both: bool = True) -> Tensor:
        """The heads' outputs added up: (N, 1) from (N, 4)."""
        hidden = self.body(inputs).tanh()
        return self.first(hidden) + self.second(hidden) if both else self.first(hidden)


def after_different_seeds(strategy: Strategy) -> str:
    """One SGD step from weights that each rank draws: "equal" or "different"
    replicas.
    """
    one, other = run_ranks(_weights_after_a_step, 2, *strategy, device="cpu")
    return "equal" if all(map(torch.equal, one, other)) else "different"


def with_a_gradient_missing_on_rank_1(strategy: Strategy) -> str:
    """Two steps in which rank 1 leaves a head out: "averaged", "wrong", or the
    error.
    """
    try:
        of_ranks = run_ranks(
            _head_without_a_gradient, 2, *strategy, device="cpu", timeout=20
        )
    except (AttributeError, RuntimeError) as error:
        return f"raises {type(error).__name__}"
    right = all(torch.allclose(found, wanted) for found, wanted in of_ranks)
    return "averaged" if right else "wrong"


def _inputs(rank: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))


def _weights_after_a_step(
    rank: int,
    wrap: Callable[[nn.Module], nn.Module],
    average: Callable[[nn.Module], object],
) -> list[Tensor]:
    torch.manual_seed(rank)
    model = TwoHeads()
    forward = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward(_inputs(rank)).mean().backward()
    average(model)
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _head_without_a_gradient(
    rank: int,
    wrap: Callable[[nn.Module], nn.Module],
    average: Callable[[nn.Module], object],
) -> tuple[Tensor, Tensor]:
    """The second head's averaged gradient, and the value that it should have: half of
    rank 0's own gradient.
    """
    torch.manual_seed(0)
    model = TwoHeads()
    model(_inputs(0)).mean().backward()
    wanted = model.second.weight.grad / 2
    model.zero_grad()
    forward = wrap(model)
    for _ in range(2):  # DDP reports an incomplete reduction in the next forward
        model.zero_grad()
        forward(_inputs(rank), both=rank == 0).mean().backward()
        average(model)
    return model.second.weight.grad, wanted
