"""What a reader gets for an answer that hangs or raises; chapters show the rest."""

import pytest
import torch
import torch.distributed as dist

from labkit.book import checker, untouched
from labkit.launch import run_ranks


def sum_over_ranks(rank, combine):
    mine = torch.full((2,), 1.0 + rank)
    combine(mine)
    return mine.tolist()


@checker
def check_sum(combine):
    for rank, found in enumerate(run_ranks(sum_over_ranks, 2, combine)):
        assert found == [3.0, 3.0], f"rank {rank} has {found}, and the sum is [3.0, 3.0]"


def only_rank_0(tensor):
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)
    else:
        dist.barrier()
        dist.barrier()


def typo(tensor):
    dist.allreduce(tensor)


def test_an_answer_that_hangs_is_told_where_each_rank_waits(capsys):
    check_sum(only_rank_0)
    said = capsys.readouterr().out
    assert said.startswith("Not yet: 2 of 2 ranks wait for others, and")
    assert "rank 0: waits in all_reduce" in said


def test_an_answer_with_a_typo_gets_its_traceback():
    with pytest.raises(AttributeError, match="allreduce"):
        check_sum(typo)


def freeze(module, others):
    module.bias.requires_grad_(False)


def replace_a_parameter(module, others):
    module.weight = torch.nn.Parameter(module.weight.detach().clone())


def gradient_in_place(module, others):
    module.weight.grad[0, 1] = torch.nan


def buried_tensor(module, others):
    others["pair"][1].add_(1)


def another_shape(module, others):
    others["pair"][0].unsqueeze_(0)


@pytest.mark.parametrize(
    ("change", "but", "said"),
    [
        (freeze, "gradients", "requires_grad of bias"),
        (replace_a_parameter, "weights and gradients", "parameter object of weight"),
        (gradient_in_place, "weights", "gradients of weight"),
        (buried_tensor, "gradients", r"arguments\[1\]\['pair'\]\[1\]"),
        (another_shape, "gradients", r"arguments\[1\]\['pair'\]\[0\]"),
        (lambda _, others: others.clear(), "weights", r"arguments\[1\]\['pair'\]\[0\]"),
        (lambda module, _: module.eval(), "weights", "modes of the modules"),
        (lambda module, _: module.bias.data.zero_()[5], "gradients", "weights of bias"),
    ],
)
def test_an_answer_that_changes_what_it_is_given_is_told_what(change, but, said):
    module = torch.nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    module.bias.data.fill_(torch.nan)  # the same NaN before and after is no change
    others = {"pair": (torch.zeros(2), torch.tensor([1, 2]))}
    with pytest.raises(AssertionError, match=f"it changes the {said}"):
        untouched(change, but=but)(module, others)


def test_an_answer_may_change_what_it_is_for():
    module = torch.nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    untouched(gradient_in_place, but="gradients")(module, {})
    assert module.weight.grad[0, 1].isnan()
