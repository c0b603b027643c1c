"""What a reader gets for an answer that hangs or raises; chapters show the rest."""

import pytest
import torch
import torch.distributed as dist

from labkit.book import checker
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
