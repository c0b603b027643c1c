"""Models, losses, and backward passes of training programs, right and wrong, for certificates."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
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


def unseeded() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return plain()


def losses(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2]).square().sum(1)


def own_mean(model: Any, x: Tensor, reduce: Reduce = mean) -> None:
    reduce(losses(model, x)).backward()


def count_of_all(model: Any, x: Tensor) -> None:
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count)
    (losses(model, x).sum() * dist.get_world_size() / count).backward()


def over_world_size(model: Any, x: Tensor) -> None:
    (losses(model, x).mean() / dist.get_world_size()).backward()


def plain_gather(model: Any, x: Tensor) -> None:
    own = model(x)
    every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own.detach())
    every[dist.get_rank()] = own
    labels = torch.arange(len(own)) + dist.get_rank() * len(own)
    cross_entropy(own @ torch.cat(every).tanh().T, labels).backward()


def accumulated(model: Any, x: Tensor, synchronized: bool = True) -> None:
    first, last = x.chunk(2)
    with model.no_sync():
        (losses(model, first).mean() / 2).backward()
    with contextlib.nullcontext() if synchronized else model.no_sync():
        (losses(model, last).mean() / 2).backward()


def never_synchronized(model: Any, x: Tensor) -> None:
    accumulated(model, x, synchronized=False)


def summed(model: Any, x: Tensor) -> None:
    own_mean(model, x)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


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
