"""The modules beside chapters: what a chapter's printed text would not show if it were wrong."""

import ast
import math
from itertools import chain

import pytest
import torch
from exercise_cells import code_of
from hypothesis import given
from hypothesis import strategies as st

from bypassed_wrapper import draw_samples, train_bypassing
from in_the_data import _noise
from in_the_step import TwoBranches
from labkit.book.chapters import chapters_of
from labkit.launch import ScriptError, project_root, run_ranks
from labkit.scenarios.padded_captioner import count_tokens, draw_captions, seeded_captioner
from labkit.scenarios.rare_samples import rare_samples
from mean_of_means import WAYS, denominators, excess, steps_on_ranks, token_weights
from museum import caught_by
from two_nodes import GRADIENTS, compute, interrupted_runs, missing, step_seconds
from what_is_averaged import sample_weights
from when_to_multiply import Experiment, try_factors

BOOK = project_root() / "book"
MODULES = sorted(p for p in BOOK.glob("*/*.py") if not p.name.endswith(".solutions.py"))


def imported_by(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_a_module_beside_a_chapter_is_imported_by_this_chapter_only():
    beside = {path.stem for path in MODULES}
    assert len(beside) == len(MODULES)
    for chapter in chapters_of(BOOK):
        found = set().union(*map(imported_by, code_of(chapter))) & beside
        assert found == ({chapter.stem} if chapter.with_suffix(".py").exists() else set()), chapter
    for module in MODULES:
        assert module.with_suffix(".ipynb").exists(), module
        assert not imported_by(module.read_text()) & beside, module


COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(COUNTS, st.data())
def test_the_weights_of_samples_are_the_derivatives_of_the_mean_of_the_ranks_losses(counts, data):
    divisors = [data.draw(st.floats(0.5, 10)) for _ in counts]
    losses = torch.randn(sum(counts), dtype=torch.float64, requires_grad=True)
    of_ranks = [own.sum() / by for own, by in zip(losses.split(counts), divisors, strict=True)]
    torch.stack(of_ranks).mean().backward()
    assert sample_weights(counts, divisors) == pytest.approx(losses.grad.tolist())


GRIDS = st.integers(1, 4).flatmap(
    lambda parts: st.lists(
        st.lists(st.integers(1, 50), min_size=parts, max_size=parts), min_size=1, max_size=4
    )
)


@given(counts=GRIDS)
def test_only_n_over_w_gives_every_token_the_same_weight_in_the_gradient(counts):
    total = sum(map(sum, counts))
    for way in WAYS:
        weights = token_weights(counts, denominators(way, counts))
        cells = zip(chain(*counts), chain(*weights), strict=True)
        assert sum(n * weight for n, weight in cells) == pytest.approx(total)
        if way == "N / W":
            assert set(chain(*weights)) == {1.0}


def test_windows_of_micro_batches_come_in_order_and_the_last_is_what_is_left():
    parts = [draw_captions(1, seed, lengths=[1 + seed]) for seed in range(5)]

    def count(_, window):
        return torch.tensor(float(sum(map(count_tokens, window))))

    epoch = [parts, parts[::-1]]
    ranks = steps_on_ranks(count, seeded_captioner(), epoch, 2, torch.nn.Identity)
    assert [logged for logged, _ in ranks[0]] == [3, 7, 5]
    assert [logged for logged, _ in ranks[1]] == [9, 5, 1]


def test_the_excess_is_zero_for_one_step_and_minus_the_covariance_over_the_mean_length():
    sums, counts = torch.tensor([6.0, 2.0, 2.0, 2.0]), torch.tensor([2.0, 4.0, 4.0, 2.0])
    found = excess(sums.double(), counts.double(), steps=[1, 4], orders=3)
    assert found.shape == (3, 2)
    assert found[:, 0].abs().max() < 1e-12
    means = sums / counts
    covariance = (counts * means).mean() - counts.mean() * means.mean()
    torch.testing.assert_close(found[:, 1], -(covariance / counts.mean()).double().expand(3))


def test_bypassed_ranks_end_as_single_processes_and_wrapped_ones_agree():
    torch.manual_seed(1)
    data, held_out = draw_samples(32), draw_samples(16)
    bypassed = run_ranks(train_bypassing, 2, data, held_out, True, False, 3)
    wrapped = run_ranks(train_bypassing, 2, data, held_out, False, False, 3)
    [alone] = run_ranks(train_bypassing, 1, data, held_out, True, False, 3, 2)
    for name, weights in alone.checkpoint.items():
        assert torch.equal(bypassed[0].checkpoint[name], weights)
        assert not torch.equal(bypassed[1].checkpoint[name], weights)
        assert torch.equal(wrapped[0].checkpoint[name], wrapped[1].checkpoint[name])
    assert bypassed[0].seen | bypassed[1].seen == set(range(32))
    assert not bypassed[0].seen & bypassed[1].seen


def test_factors_of_ranks_that_hold_different_gradients_are_refused():
    model, inputs, targets = torch.nn.Linear(3, 2), torch.randn(6, 3), torch.randn(6, 2)
    experiment = Experiment(model, inputs, targets, combine=lambda module: None)
    with pytest.raises(RuntimeError, match="the ranks hold different gradients"):
        try_factors(experiment, torch.nn.functional.mse_loss, torch.nn.functional.mse_loss)


def test_without_overlap_one_bucket_costs_the_latency_and_the_bandwidth_of_the_ring_once():
    world, nbytes = 16, sum(GRADIENTS)
    latency = (3 * 3e-6 + 10e-6) / 4  # three links inside the node, one to the next node
    expected = 2 * (world - 1) * (latency + nbytes / world * 8 / 400e9)
    step = step_seconds(world, "flat ring", [range(len(GRADIENTS))], overlap=False)
    assert step - compute(world).end == pytest.approx(expected)
    with pytest.raises(ValueError, match="6 ranks do not fill nodes of 4"):
        step_seconds(6, "tree", [range(len(GRADIENTS))])


def test_each_missing_rank_is_listed_once_without_its_machine():
    said = (
        'rank 0 on a timed out at "step 5: backward"\n'
        '  stuck: rank 1 on b, last seen at "step 5: its batch"\n'
        '  gone: rank 2 on c, last seen at "step 4: backward"\n'
        'rank 3 on d timed out at "step 5: backward"\n'
        '  stuck: rank 1 on b, last seen at "step 5: its batch"\n'
    )
    assert missing(ScriptError("failed", said)) == [
        'gone: rank 2, last seen at "step 4: backward"',
        'stuck: rank 1, last seen at "step 5: its batch"',
    ]


def test_a_run_that_hangs_instead_of_failing_is_not_the_failure_that_was_intended(monkeypatch):
    def hangs(script, *options, **launch):
        if "--stick" in options or "--lose-node" in options:
            raise ScriptError("stopped: it had not ended after 300 s", exit_code=None)
        return "weights 0123456789abcdef on 2 of 2 ranks"

    monkeypatch.setattr("two_nodes.run_script", hangs)
    with pytest.raises(RuntimeError, match="did not fail as intended: stopped"):
        interrupted_runs()


def test_ranks_that_deviate_alike_have_correlation_one_and_twice_the_noise_of_four():
    random = torch.Generator().manual_seed(0)
    expected = torch.ones(5, dtype=torch.float64)
    alike = torch.randn(500, 5, generator=random, dtype=torch.float64).expand(4, 500, 5) + expected
    apart = torch.randn(4, 500, 5, generator=random, dtype=torch.float64) + expected
    same, other = _noise(alike, expected), _noise(apart, expected)
    assert math.isclose(same.correlation, 1.0)
    assert abs(other.correlation) < 0.05
    assert math.isclose(same.off / other.off, 2.0, rel_tol=0.1)
    # Ranks that differ in their means are compared with their own.
    shifted = _noise(apart + torch.arange(4.0).reshape(4, 1, 1), expected)
    assert math.isclose(shifted.correlation, other.correlation)


def test_a_batch_without_a_rare_sample_gives_the_right_branch_no_gradient():
    inputs, model = rare_samples(rare_inputs=True).inputs, TwoBranches()
    apart = torch.cat([model(sample[None]) for sample in inputs])
    torch.testing.assert_close(model(inputs), apart)
    model(inputs[:8]).sum().backward()
    lacking = [name for name, p in model.named_parameters() if p.grad is None]
    assert lacking == ["right.weight", "right.bias"]


def only_rank_1_fails(wrap, rank, world_size):
    assert rank != 1 or wrap.__name__ != "SumInsteadOfAverage"


def test_an_exhibit_is_caught_if_a_test_fails_on_any_rank():
    assert caught_by([only_rank_1_fails]) == {"only_rank_1_fails": {"sum_instead_of_average"}}
