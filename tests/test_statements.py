"""Statements of the book that no cell shows: its rule, and those of the chapters on surprises."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

from labkit.launch import RanksTimeoutError, run_ranks
from labkit.testing import gradient_of, gradients, largest_difference
from miniddp import MiniDDP
from miniddp.collectives import differentiable
from tests.ddp_models import UsedTwice
from tests.on_ranks import on_ranks


class Encoder(nn.Module):
    """Outputs (n, 4), and a scale that belongs to the loss, as the temperature of CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.log_scale.exp()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_delivers_the_gradient_of_the_mean_of_any_local_losses(world_size):
    """The rule: DDP delivers the gradient of (1/W) Σ L_r, so choose Σ L_r = W · L.

    Here every rank weighs the outputs of all ranks as it likes. The rule's special cases are the
    leaves of "When do I multiply by the world size?", which the chapter compares with one process.
    """
    torch.manual_seed(11)
    model, inputs = Encoder().double(), torch.randn(2 * world_size, 3).double()
    weights = torch.randn(world_size, len(inputs), 4).double()

    def local_loss(outputs: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return (weight * outputs).sum().tanh() * scale

    def mean_loss(model: nn.Module) -> Tensor:
        outputs, scale = model(inputs)
        return torch.stack([local_loss(outputs, scale, weight) for weight in weights]).mean()

    true = gradient_of(model, mean_loss)

    def work(rank: int) -> None:
        for wrap in (DistributedDataParallel, MiniDDP):
            ddp = wrap(copy.deepcopy(model))
            outputs, scale = ddp(inputs[2 * rank : 2 * rank + 2])
            local_loss(differentiable.all_gather(outputs), scale, weights[rank]).backward()
            assert largest_difference(gradients(ddp), true) < 1e-12

    run_ranks(work, world_size, device="cpu")


@pytest.mark.parametrize("keyword", ["find_unused_parameters", "static_graph"])
@on_ranks(2)
def test_a_wrapper_that_was_not_kept_raises_with_these_keywords(rank: int, keyword) -> None:
    inputs = torch.ones(2, 3) * rank
    outputs = DistributedDataParallel(nn.Linear(3, 1), **{keyword: True})(inputs)
    with pytest.raises(AttributeError, match="reducer"):
        outputs.sum().backward()


@on_ranks(2)
def test_a_reentrant_layer_used_twice_is_noticed_in_the_middle_of_a_network(rank: int) -> None:
    ddp = DistributedDataParallel(UsedTwice())
    with pytest.raises(RuntimeError, match="ready only once"):
        ddp(torch.ones(4, 3) + rank).sum().backward()


def _after_join(rank: int, momentum: float) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(2, 1)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum)
    random = torch.Generator().manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(4, 2, generator=random)).square().sum().backward()
        optimizer.step()

    with Join([ddp]):
        for _ in range(4 if rank == 0 else 2):
            step()
    joined = module.weight.detach().clone()
    step()
    return joined, module.weight.detach()


@pytest.mark.parametrize(("momentum", "diverge"), [(0.0, False), (0.9, True)])
def test_after_join_the_weights_agree_but_momentum_makes_replicas_diverge(momentum, diverge):
    (joined_0, next_0), (joined_1, next_1) = run_ranks(_after_join, 2, momentum)
    assert torch.equal(joined_0, joined_1)
    assert torch.equal(next_0, next_1) != diverge


def _rank_0_evaluates_between_steps(rank: int, with_grad: bool) -> torch.Tensor:
    """Two training steps, an evaluation on rank 0 alone, two more steps: the last gradient."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))
    inputs = torch.randn(4, 6) + rank

    def two_steps() -> None:
        ddp.train()
        for _ in range(2):
            ddp.zero_grad()
            ddp(inputs).exp().sum().backward()

    two_steps()
    if rank == 0:
        ddp.eval()
        with torch.set_grad_enabled(with_grad):
            for _ in range(3):
                ddp(inputs)
    two_steps()
    return ddp.module[0].weight.grad


def test_without_a_barrier_rank_0s_evaluation_is_paired_with_the_others_next_forward():
    rank_0, rank_1 = run_ranks(_rank_0_evaluates_between_steps, 2, False)
    assert torch.equal(rank_0, rank_1)
    assert rank_0.abs().max() > 1e-3


def test_without_no_grad_every_forward_of_an_evaluation_broadcasts_and_the_job_hangs():
    with pytest.raises(RanksTimeoutError):
        run_ranks(_rank_0_evaluates_between_steps, 2, True, stuck_after=1, device="cpu")
