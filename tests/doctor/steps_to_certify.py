"""Models, losses, and backward passes of training programs, right and wrong, for certificates."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from miniddp import MiniDDP

Reduce = Callable[[Tensor], Tensor]
CONSTANT = 8


def mean(losses: Tensor) -> Tensor:
    return losses.mean()


def sum_over_constant(losses: Tensor) -> Tensor:
    return losses.sum() / CONSTANT


def batches(rank: int, world: int) -> Iterator[Tensor]:
    yield torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def unequal(rank: int, world: int) -> Iterator[Tensor]:
    yield torch.randn(2 + 3 * rank, 5, generator=torch.Generator().manual_seed(rank))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def ddp() -> nn.Module:
    return DistributedDataParallel(plain())


def miniddp() -> nn.Module:
    return MiniDDP(plain())


def sharded() -> nn.Module:
    model = plain()
    fully_shard(model)
    return model


def replicated() -> nn.Module:
    model = plain()
    replicate(model)
    return model


def with_dropout() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 2)))


def with_own_statistics() -> nn.Module:
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    )


def with_frozen_statistics() -> nn.Module:
    return with_own_statistics().eval()


def unseeded() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return plain()


def losses(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2]).square().sum(1)


def own_mean(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    reduce(losses(model, x)).backward()


def count_of_all(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count)
    divisor = count if reduce is mean else CONSTANT
    (losses(model, x).sum() * dist.get_world_size() / divisor).backward()


def over_world_size(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    (reduce(losses(model, x)) / dist.get_world_size()).backward()


def contrast(first: Tensor, second: Tensor, reduce: Reduce, offset: int = 0) -> Tensor:
    labels = torch.arange(len(first)) + offset
    return reduce(cross_entropy(first @ second.T, labels, reduction="none"))


def plain_gather(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    own = model(x)
    every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own.detach())
    every[dist.get_rank()] = own
    contrast(own, torch.cat(every).tanh(), reduce, dist.get_rank() * len(own)).backward()


def differentiable_gather(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    whole = torch.cat(all_gather(model(x)))
    contrast(whole, whole.tanh(), reduce).backward()


def own_negatives(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    own = model(x)
    contrast(own, own.tanh(), reduce).backward()


def accumulated(model: Any, x: Tensor, reduce: Reduce = mean, synchronized: bool = True) -> None:
    first, last = x.chunk(2)
    with model.no_sync():
        (reduce(losses(model, first)) / 2).backward()
    with contextlib.nullcontext() if synchronized else model.no_sync():
        (reduce(losses(model, last)) / 2).backward()


def never_synchronized(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    accumulated(model, x, reduce, synchronized=False)


def summed(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    own_mean(model, x, reduce)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def averaged(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    summed(model, x, reduce)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def bypassed(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    own_mean(model.module, x, reduce)


class SumOfRanks(torch.autograd.Function):
    """Its backward all-reduces, and does not divide."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def summed_in_backward(model: Any, x: Tensor) -> None:
    weights = {name: SumOfRanks.apply(weight) for name, weight in model.named_parameters()}
    own_mean(lambda rows: torch.func.functional_call(model, weights, rows), x)


def computed_by_hand(model: Any, x: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, grad in zip(
        parameters, torch.autograd.grad(losses(model, x).mean(), parameters), strict=True
    ):
        parameter.grad = grad


def not_a_number(model: Any, x: Tensor) -> None:
    (losses(model, x).mean() * float("nan")).backward()


def zero(model: Any, x: Tensor) -> None:
    (losses(model, x).mean() * 0).backward()


def cropped(model: Any, x: Tensor) -> None:
    own_mean(model, x[:4])


def steps(model: Any, x: Tensor) -> None:
    own_mean(model, x)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def raises(model: Any, x: Tensor) -> None:
    raise ArithmeticError("no loss today")


def waits(model: Any, x: Tensor) -> None:
    own_mean(model, x)
    if dist.get_world_size() > 1 and dist.get_rank() == 0:
        dist.barrier()


def pairs(rank: int, world: int) -> Iterator[dict[str, Any]]:
    (x,) = batches(rank, world)
    yield {"x": x, "names": ["a"] * 4}


def join_pairs(given: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.cat([one["x"] for one in given]), "names": []}


def deal_pairs(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"x": part, "names": []} for part in join_pairs(given)["x"].flip(0).split(4)]


def of_pairs(model: Any, batch: dict[str, Any]) -> None:
    own_mean(model, batch["x"])
