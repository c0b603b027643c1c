"""The sentence that a reader gets for an answer, and the source code that a chapter shows."""

import inspect

import pytest
import torch
import torch.distributed as dist

from labkit.book import checker, source
from labkit.launch import run_ranks


def sum_over_ranks(rank, combine):
    mine = torch.full((2,), 1.0 + rank)
    combine(mine)
    return mine.tolist()


@checker
def check_sum(combine):
    for rank, found in enumerate(run_ranks(sum_over_ranks, 2, combine)):
        assert found == [3.0, 3.0], f"rank {rank} has {found}, and the sum is [3.0, 3.0]"


def stub(tensor):
    raise NotImplementedError("write sum_over_ranks first")


def nothing(tensor):
    pass


def only_rank_0(tensor):
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)
    else:
        dist.barrier()
        dist.barrier()


def typo(tensor):
    dist.allreduce(tensor)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (dist.all_reduce, "Right."),
        (stub, "Not yet: write sum_over_ranks first"),
        (nothing, "Not yet: rank 0 has [1.0, 1.0], and the sum is [3.0, 3.0]"),
    ],
)
def test_an_answer_gets_one_sentence(answer, said, capsys):
    check_sum(answer)
    first, *_ = capsys.readouterr().out.splitlines()  # pytest adds lines to assertions
    assert first == said


def test_an_answer_that_hangs_is_told_where_each_rank_waits(capsys):
    check_sum(only_rank_0)
    said = capsys.readouterr().out
    assert said.startswith("Not yet: 2 of 2 ranks wait for others, and")
    assert "rank 0: waits in all_reduce" in said


def test_an_answer_with_a_typo_gets_its_traceback():
    with pytest.raises(AttributeError, match="allreduce"):
        check_sum(typo)


class Example:
    """A class to be shown."""

    def method(self) -> int:
        """Say seven."""
        return 7


def bare() -> int:
    return 8


def test_the_source_is_shown_as_a_block_of_python():
    shown = source(Example).data
    assert shown == f"```python\n{inspect.getsource(Example).rstrip()}\n```"


def test_several_things_stand_in_one_block_without_their_own_docstrings():
    shown = source(Example.method, bare, docstrings=False).data
    assert shown.splitlines() == [
        "```python",
        "def method(self) -> int:",
        "    return 7",
        "",
        "",
        "def bare() -> int:",
        "    return 8",
        "```",
    ]
