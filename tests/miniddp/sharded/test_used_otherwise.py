"""`fully_shard` on models that change after sharding, or are used in unusual ways.

On two ranks, each case's gradients are bitwise equal to those of one process with both batches,
and to those of torch's `fully_shard`, unless that lacks the case.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import MODELS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from miniddp import MiniDDP
from miniddp.sharded import (
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
)
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.on_ranks import on_ranks

Forward = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A forward takes one of two branches. It also keeps what it returns."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x, left=True):
        self.kept = self.head(torch.tanh((self.left if left else self.right)(x)))
        return self.kept

    def features(self, x):
        return self.left(x)

    def logits(self, x):
        return self.head(x)


def build(how: Any) -> nn.Module:
    torch.manual_seed(7)
    net = Net()
    for part in (net.left, net.right, net):
        how(part)
    return net


def frozen_in_turns(net: nn.Module, backward: Callable[[Forward], None]) -> None:
    net.left.requires_grad_(False)
    backward(net)
    net.left.requires_grad_(True)
    net.head.requires_grad_(False)
    backward(net)


def checkpointed_whole(net: nn.Module, backward: Callable[[Forward], None]) -> None:
    backward(lambda x: checkpoint(net, x.requires_grad_(), use_reentrant=False))


def compiled(net: nn.Module, backward: Callable[[Forward], None]) -> None:
    backward(torch.compile(net, backend="eager"))


def synchronized_without_a_branch(net: nn.Module, backward: Callable[[Forward], None]) -> None:
    for left in (True, False):
        if hasattr(net, "set_requires_gradient_sync"):
            net.set_requires_gradient_sync(not left)
        backward(lambda x, left=left: net(x, left))
        net.left.requires_grad_(False)  # its gradient is still this step's


def in_another_dtype(net: nn.Module, backward: Callable[[Forward], None]) -> None:
    net.to(torch.float64)
    backward(lambda x: net(x.double()))


def a_loss_that_is_no_output(net: nn.Module, backward: Callable[[Forward], None]) -> None:
    net.register_forward_hook(lambda *_: (), prepend=True)
    backward(lambda x: net(x) or net.kept)


CASES = [frozen_in_turns, checkpointed_whole, compiled, synchronized_without_a_branch]
CASES += [in_another_dtype, a_loss_that_is_no_output]


def gradients(case: Callable, how: Any, ranks: list[int]) -> list[Tensor | None]:
    """The averages over two ranks, of which this process computes the losses of `ranks`."""
    net = build(how)

    def backward(forward: Forward) -> None:
        for rank in ranks:
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(rank))
            (forward(x).pow(2).mean() / len(ranks)).backward()

    case(net, backward)
    found = []
    for parameter in net.parameters():
        gradient = parameter.grad
        if gradient is not None and hasattr(parameter, "sharding"):
            gradient = parameter.sharding.gather(gradient)
        found.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
    return found


@on_ranks(2)
def test_gradients_are_those_of_one_process_and_of_torch(rank: int) -> None:
    for case in CASES:
        ours = gradients(case, fully_shard, [rank])
        others = {"one process": gradients(case, lambda part: part, [0, 1])}
        if case is not a_loss_that_is_no_output:  # torch's reduces nothing
            others["torch"] = gradients(case, torchs_fully_shard, [rank])
        for name, theirs in others.items():
            other_order = (case, name) == (synchronized_without_a_branch, "one process")
            same = torch.allclose if other_order else torch.equal
            for a, b in zip(ours, theirs, strict=True):
                none = a is None and b is None
                assert none or same(a, b), f"{case.__name__}: {name}"


@on_ranks(2)
def test_what_would_be_silently_wrong_is_refused_on_every_rank(rank: int) -> None:
    net = build(fully_shard)
    net(torch.ones(2, 12)).sum().backward()
    late = build(fully_shard)
    late(torch.ones(2, 12)).sum().backward()
    late.head.bias = nn.Parameter(torch.zeros(3))
    divided = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2,))
    divided.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    experts = [fully_shard(nn.Linear(2, 2)) for _ in range(2)]  # in no sharded module
    encode, decode = nn.Linear(2, 3), nn.Linear(3, 2)
    decode.weight = encode.weight
    fully_shard(encode)
    other = "is all-gathering a different module"
    for said, attempt in {
        "used while sharded": lambda: net.logits(torch.ones(2, 12)),
        "a Linear was used while": lambda: net.forward(torch.ones(2, 12)),
        "Linear.weight was used": lambda: net.right.weight.sum().backward(),
        other: lambda: net(torch.ones(2, 12), rank == 0),
        "is all-gathering the model (FSDPLinear)": lambda: experts[rank](torch.ones(1, 2)),
        "head.bias was added": lambda: late(torch.ones(2, 12)),
        "weight is a DTensor": lambda: fully_shard(divided),
        "is never called": lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
        "a list is never called": lambda: fully_shard([nn.Linear(2, 2)]),
        "LBFGS computes with whole": lambda: torch.optim.LBFGS(net.parameters()).step(int),
        "is tied to a parameter": lambda: fully_shard(decode),
        "has been sharded already": lambda: fully_shard(experts[0]),
        "same model across all ranks": lambda: fully_shard(nn.Linear(2, 2 + rank)),
        "is a scalar": lambda: fully_shard(MODELS["odd shapes"].build()),
        "is not contiguous": lambda: fully_shard(MODELS["convolution"].build()),
        "(3, 2)": lambda: load_full_state_dict(experts[0], {"weight": torch.zeros(3, 2)}),
        "full_state_dict": lambda: copy.deepcopy(experts[0]),
        "shard the wrapper's .module": lambda: fully_shard(MiniDDP(nn.Linear(2, 2))),
        "This module is a FSDPLinear, which averages": lambda: MiniDDP(experts[0]),
        "already, or those of a part of it": lambda: DropIn(nn.Sequential(experts[0])),
    }.items():
        with pytest.raises((ValueError, RuntimeError, TypeError), match=re.escape(said)):
            attempt()


@on_ranks(4)
def test_a_module_that_differs_on_one_rank_is_refused_on_all_ranks_of_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(RuntimeError, match="same model"):
        fully_shard(nn.Linear(2, 3 if rank == 1 else 2), mesh=mesh)


@on_ranks(2)
def test_hooks_of_a_sharded_parameter_run_once_when_its_gradient_is_there() -> None:
    net, shapes = fully_shard(nn.Linear(12, 4)), []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: shapes.append(p.grad.shape))
    one, other = 2 * torch.ones(2, 2, 12, requires_grad=True)
    (net(one) + net(other)).sum().backward()
    assert shapes == [(2, 12), (2,)]


@on_ranks(2)
def test_plain_values_are_saved_of_all_parameters_also_without_elements() -> None:
    net = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 2))
    net[0].nothing = nn.Parameter(torch.empty(0, 12))
    fully_shard(net[0])
    state = full_state_dict(net)
    assert state["0.nothing"].shape == (0, 12)
    assert state["1.weight"].shape == (2, 4)
    assert not any(value.requires_grad for value in state.values())


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.turns = nn.Parameter(torch.tensor([1 + 2j, 3 + 4j, 5 + 6j]))

    def forward(self, x):
        return (self.turns * x).imag.sum()


@on_ranks(2)
def test_complex_gradients_are_reduced_as_they_are(rank: int) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    net = fully_shard(Rotation(), mp_policy=policy)
    net((rank + 1) * torch.ones(3)).backward()
    assert net.turns.sharding.gather(net.turns.grad).tolist() == [1.5j, 1.5j, 1.5j]


@on_ranks(1)
def test_modules_of_one_class_still_have_one_class() -> None:
    one, other, third = (fully_shard(kind(2, 2)) for kind in (nn.Linear, nn.Linear, nn.RNN))
    assert type(one) is type(other) is not type(third)


@on_ranks(3)
def test_every_kind_of_norm_is_that_of_the_whole_gradient(rank: int) -> None:
    net = build(fully_shard)
    net(torch.randn(4, 12, generator=torch.Generator().manual_seed(rank))).sum().backward()
    used = [p for p in net.parameters() if p.grad is not None]
    wholes = [p.sharding.gather(p.grad) for p in used]
    for kind in (1.0, 2.0, 3.0, float("inf")):
        before = copy.deepcopy([p.grad for p in used])
        ours = clip_grad_norm_(used, 0.1, norm_type=kind)
        assert float(ours) == pytest.approx(float(nn.utils.get_total_norm(wholes, kind)), 1e-5)
        for parameter, gradient in zip(used, before, strict=True):
            parameter.grad = gradient
    if rank == 1:
        used[0].grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="nan"):
        clip_grad_norm_(used, 0.1, norm_type=float("inf"), error_if_nonfinite=True)
