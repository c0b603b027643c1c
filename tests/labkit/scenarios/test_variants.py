"""Variants of one gradient on ranks: what is compared, what is shown, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.scenarios.rare_samples import Problem, halves, rare_samples
from labkit.scenarios.variants import Held, try_variants
from labkit.testing.compare import gradients
from labkit.testing.verdict import gradient_of


def averaged(module: nn.Module, rows: slice) -> None:
    ddp = DistributedDataParallel(module)
    rare_samples().loss(ddp, rows).backward()


def own_with_rank(module: nn.Module, rows: slice) -> Held:
    rare_samples().loss(module, rows).backward()
    return Held(gradients(module), (dist.get_rank(),))


def equal_with_rank(module: nn.Module, rows: slice) -> Held:
    averaged(module, rows)
    return Held(gradients(module), (dist.get_rank(),))


def test_slices_of_the_problem_cover_it_and_the_rare_samples_are_the_last_ranks():
    problem = rare_samples()
    covered = [i for rank in range(4) for i in range(16)[problem.rows(rank, 4)]]
    assert covered == list(range(16))
    assert problem.targets[problem.rows(3, 4)].min() > problem.targets[:12].max() - 2
    assert [i for half in halves(slice(4, 8)) for i in range(16)[half]] == [4, 5, 6, 7]


def test_the_problem_is_the_same_in_every_process_and_leaves_the_callers_seed_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, other = rare_samples(), rare_samples(rare_inputs=True)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.inputs[12:] + 2, other.inputs[12:])
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))


def test_an_average_gets_one_line_and_local_gradients_one_per_rank_with_its_own_notes():
    problem = rare_samples()
    truth = gradient_of(problem.model, problem.loss)
    tried = try_variants(problem, [own_with_rank], truth, world_size=2)
    assert [v.ranks for v in tried.verdicts] == ["rank 0", "rank 1"]
    assert tried.notes == [(0,), (1,)]
    assert {v.kind for v in tried.verdicts} == {"direction bug"}
    assert tried.table("it is").splitlines()[0].split() == [
        *("variant", "ranks", "ratio", "cosine", "verdict", "it", "is")
    ]
    (verdict,) = try_variants(problem, {"mean": averaged}, truth, world_size=2).verdicts
    assert (verdict.variant, verdict.ranks, verdict.kind) == ("mean", "all", "right")


def test_equal_gradients_with_different_notes_are_refused():
    problem = rare_samples()
    truth = gradient_of(problem.model, problem.loss)
    with pytest.raises(ValueError, match="equal with rank: equal tensors on all ranks, but notes"):
        try_variants(problem, [equal_with_rank], truth, world_size=2)


def test_every_variant_starts_from_the_problems_own_weights():
    """The first variant changes its replica; the second must not see that."""

    def spoils(module: nn.Module, rows: slice) -> None:
        averaged(module, rows)
        for parameter in module.parameters():
            parameter.data.zero_()

    problem = Problem(rare_samples().model, rare_samples().inputs, rare_samples().targets)
    truth = gradient_of(problem.model, problem.loss)
    tried = try_variants(problem, {"spoils": spoils, "mean": averaged}, truth, world_size=2)
    assert [v.kind for v in tried.verdicts] == ["right", "right"]
