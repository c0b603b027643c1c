"""Sum and average: the factor by which a combined gradient is off, and its lab under torchrun."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.launch.scripts import ScriptError, project_root, run_script
from labkit.scenarios.sum_and_average import (
    BATCH,
    COMBINATIONS,
    LEARNING_RATE,
    LOSSES,
    Combine,
    Reduction,
    batches,
    combined_factor,
    matching_lr,
    one_epoch,
    seeded_data,
    seeded_model,
    train,
)
from labkit.testing.compare import gradients, largest_difference, ratio_and_cosine
from labkit.testing.museum.sum_instead_of_average import SumInsteadOfAverage
from miniddp.extras.comm_hooks import total
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from miniddp.training import MiniDataParallel

LAB = "labs/sum_or_average.py"
WAYS = list(product(LOSSES, COMBINATIONS))
WRAPPERS = (DropIn, DistributedDataParallel)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def one_process(batch: int, loss: Reduction, lr: float, samples: int = 128) -> list[Tensor]:
    return one_epoch(seeded_model(), batches(seeded_data(samples=samples), batch), loss, lr).weights


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("epoch", [0, 3])
def test_each_step_of_the_ranks_holds_the_samples_of_one_process(
    world_size: int, epoch: int
) -> None:
    numbered = torch.utils.data.TensorDataset(torch.arange(100))
    steps = [torch.cat(list(b)).tolist() for b in batches(numbered, 4 * world_size, epoch=epoch)]
    ranks = [batches(numbered, 4, rank, world_size, epoch) for rank in range(world_size)]
    of_ranks = [
        sorted(sample for (share,) in shares for sample in share.tolist())
        for shares in zip(*ranks, strict=True)
    ]
    assert of_ranks == [sorted(step) for step in steps]
    assert len(steps) == 100 // (4 * world_size)
    other_epoch = next(iter(batches(numbered, 4 * world_size, epoch=epoch + 1)))
    assert other_epoch[0].tolist() != steps[0]


class Case(NamedTuple):
    loss: Reduction
    combine: Combine
    own_batch: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    loss, combine = draw(st.sampled_from(WAYS))
    return Case(loss, combine, draw(st.integers(1, 9)), draw(st.integers(0, 99)))


def combined(rank: int, world_size: int, several: list[Case]) -> list[list[list[Tensor]]]:
    """For each case and each wrapper the combined gradient of one batch."""
    return [[of_one_batch(wrap, case, rank, world_size) for wrap in WRAPPERS] for case in several]


def of_one_batch(wrap: Callable, case: Case, rank: int, world_size: int) -> list[Tensor]:
    wrapped = wrap(seeded_model(case.seed))
    if case.combine == "sum":
        wrapped.register_comm_hook(None, total)
    x, y = next(iter(batches(seeded_data(case.seed), case.own_batch, rank, world_size)))
    F.cross_entropy(wrapped(x), y, reduction=case.loss).backward()
    return gradients(wrapped)


@settings(max_examples=5)
@given(several=st.lists(cases(), min_size=4, max_size=4), world_size=st.integers(2, 4))
def test_the_combined_gradient_is_the_full_batchs_times_the_factor(
    several: list[Case], world_size: int
) -> None:
    wanted = [of_one_batch(nn.Sequential, alone(case, world_size), 0, 1) for case in several]
    for of_rank in run_ranks(combined, world_size, several):
        for case, true, of_wrappers in zip(several, wanted, of_rank, strict=True):
            factor = combined_factor(case.loss, case.combine, world_size)
            for found in of_wrappers:
                assert ratio_and_cosine(found, true) == pytest.approx((factor, 1.0), abs=1e-5)


def alone(case: Case, world_size: int) -> Case:
    """The same samples on one process, where nothing is combined."""
    return case._replace(combine="average", own_batch=case.own_batch * world_size)


def every_way(rank: int, world_size: int) -> list[list[Tensor]]:
    """Weights after an epoch, for each way and each wrapper, with the matching learning rate."""
    found = []
    for (loss, combine), own_batch in product(WAYS, (BATCH // world_size, BATCH)):
        for wrap in WRAPPERS:
            wrapped = wrap(seeded_model())
            if combine == "sum":
                wrapped.register_comm_hook(None, total)
            lr = matching_lr(loss, combine, world_size, own_batch * world_size)
            loader = batches(seeded_data(samples=128), own_batch, rank, world_size)
            found.append(one_epoch(wrapped, loader, loss, lr).weights)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_matching_learning_rate_trains_as_one_process_does(world_size: int) -> None:
    wanted = []
    for (loss, _), batch in product(WAYS, (BATCH, BATCH * world_size)):
        lr = LEARNING_RATE * (batch / BATCH if loss == "mean" else 1)
        wanted += [one_process(batch, loss, lr)] * len(WRAPPERS)
    moved = largest_difference(wanted[0], weights(seeded_model()))
    assert moved > 0.01
    for found in run_ranks(every_way, world_size):
        for ours, theirs in zip(found, wanted, strict=True):
            assert largest_difference(ours, theirs) < 1e-6


def test_the_linear_scaling_rule_comes_near_and_is_no_identity() -> None:
    sixteen, moved = one_process(16, "mean", 0.01), weights(seeded_model())
    near = largest_difference(one_process(32, "mean", 0.02), sixteen)
    unscaled = largest_difference(one_process(32, "mean", 0.01), sixteen)
    assert 1e-5 < near < 0.05 * largest_difference(moved, sixteen)
    assert unscaled > 10 * near


@pytest.mark.parametrize(
    ("loss", "combine", "world_size", "batch", "lr"),
    [
        ("mean", "average", 2, 16, 0.01),
        ("mean", "sum", 2, 16, 0.005),
        ("mean", "sum", 4, 16, 0.0025),
        ("mean", "average", 2, 8, 0.005),
        ("mean", "average", 2, 32, 0.02),
        ("mean", "sum", 2, 32, 0.01),
        ("sum", "average", 2, 16, 0.02),
        ("sum", "sum", 2, 32, 0.01),
    ],
)
def test_the_learning_rates_of_the_thread(
    loss: Reduction, combine: Combine, world_size: int, batch: int, lr: float
) -> None:
    assert matching_lr(loss, combine, world_size, batch) == pytest.approx(lr, rel=1e-12)


def summing_twin(rank: int, world_size: int) -> list[list[Tensor]]:
    """An epoch under a wrapper that sums, with the averaging and with its own learning rate."""
    found = []
    for combine in COMBINATIONS:
        model = seeded_model()
        wrapped = SumInsteadOfAverage(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=matching_lr("mean", combine, 2, BATCH))
        for x, y in batches(seeded_data(samples=128), BATCH // 2, rank, world_size):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            wrapped.finish()
            optimizer.step()
        found.append(weights(model))
    return found


def test_a_wrapper_that_sums_is_rejected_with_the_averages_learning_rate() -> None:
    wanted = one_process(BATCH, "mean", LEARNING_RATE)
    for as_average, as_sum in run_ranks(summing_twin, 2):
        assert largest_difference(as_average, wanted) > 1e-3
        assert largest_difference(as_sum, wanted) < 1e-6


def hybrid(rank: int, world_size: int) -> list[list[Tensor]]:
    found = []
    for wrap in WRAPPERS:
        wrapped = wrap(MiniDataParallel(seeded_model(), ["cpu"] * 2))
        loader = batches(seeded_data(samples=128), BATCH // 2, rank, world_size)
        found.append(one_epoch(wrapped, loader).weights)
    return found


def test_batch_16_on_any_mixture_of_processes_and_devices_keeps_its_learning_rate() -> None:
    wanted = one_process(BATCH, "mean", LEARNING_RATE)
    for devices in (2, 4):
        parallel = MiniDataParallel(seeded_model(), ["cpu"] * devices)
        found = one_epoch(parallel, batches(seeded_data(samples=128), BATCH)).weights
        assert largest_difference(found, wanted) < 1e-6
    for found in run_ranks(hybrid, 2):
        assert all(largest_difference(ours, wanted) < 1e-6 for ours in found)


def test_torchs_data_parallel_keeps_it_too_on_the_gpus_that_there_are() -> None:
    # Without two GPUs torch runs the plain module, and MiniDataParallel is what is compared above.
    model = seeded_model()
    if torch.cuda.device_count() > 1:
        model = nn.DataParallel(model.cuda())
    found = one_epoch(model, batches(seeded_data(samples=128), BATCH)).weights
    assert largest_difference(found, one_process(BATCH, "mean", LEARNING_RATE)) < 1e-6


def test_scale_and_clip_do_what_they_say() -> None:
    def steps(**options: float) -> list[Tensor]:
        model = seeded_model()
        before = weights(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        train(model, batches(seeded_data(samples=16), 16), optimizer, **options)
        return [after - w for after, w in zip(weights(model), before, strict=True)]

    plain = steps()
    assert ratio_and_cosine(steps(scale=0.5), plain) == pytest.approx((0.5, 1), abs=1e-6)
    length = torch.cat([step.flatten() for step in steps(scale=7, clip=0.25)]).norm()
    assert length.item() == pytest.approx(0.25, rel=1e-4)


def test_another_loss_or_combination_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss is one of mean, sum .* got 'median' and 'sum'"):
        combined_factor("median", "sum", 2)
    with pytest.raises(ValueError, match="combine one of average, sum, got 'mean' and 'hope'"):
        matching_lr("mean", "hope", 2, 16)


def rows_of(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.startswith(("mean", "sum"))]


def test_the_lab_prints_eight_ways_with_the_threads_learning_rates() -> None:
    rows = rows_of(run_script(LAB, ranks=2))
    found = [(loss, combine, int(everyone), lr) for loss, combine, _, everyone, _, lr, *_ in rows]
    assert found == [
        ("mean", "average", 16, "0.01"),
        ("mean", "sum", 16, "0.005"),
        ("sum", "average", 16, "0.02"),
        ("sum", "sum", 16, "0.01"),
        ("mean", "average", 32, "0.02"),
        ("mean", "sum", 32, "0.01"),
        ("sum", "average", 32, "0.02"),
        ("sum", "sum", 32, "0.01"),
    ]
    assert [row[4] for row in rows] == ["1.0000", "2.0000", "0.5000", "1.0000"] * 2
    assert all(row[6:10] == ["<", "1e-06"] * 2 for row in rows)
    assert all(row[10:] == ["<", "1e-06"] for row in rows[:4])
    assert all(float(row[10]) > 1e-5 for row in rows[4:])


def test_on_four_ranks_and_with_another_seed_the_lab_agrees_too() -> None:
    rows = rows_of(run_script(LAB, "--seed", "7", ranks=4))
    assert [row[4] for row in rows[:4]] == ["1.0000", "4.0000", "0.2500", "1.0000"]
    assert [row[5] for row in rows[:4]] == ["0.01", "0.0025", "0.04", "0.01"]


@pytest.mark.parametrize(
    ("right", "broken", "said"),
    [
        ("register_comm_hook(None, total)", "register_comm_hook(None, average)", "mean loss, sum"),
        ("way.own_batch * world_size)", "way.own_batch)", "mean loss, average"),
        (
            "wrapped = wrap(seeded_model(seed).to(device))",
            "wrapped = wrap(seeded_model(seed).to(device))\n"
            "    if wrap is DistributedDataParallel:\n"
            "        wrapped.module[0].weight.register_hook(lambda g: g * torch.nan)",
            "mean loss, average",
        ),
    ],
)
def test_the_lab_fails_if_a_way_is_not_what_one_process_does(
    monkeypatch, tmp_path, right: str, broken: str, said: str
) -> None:
    text = (project_root() / LAB).read_text()
    assert right in text
    text = text.replace(right, broken).replace("import total", "import average, total")
    (tmp_path / "labs").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / LAB).write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match=f"not what one process does: {said}"):
        run_script(LAB, ranks=2)


def test_on_three_ranks_the_lab_says_which_numbers_there_are() -> None:
    with pytest.raises(ScriptError, match=r"evenly among 3 ranks\. Start it on 1, 2, 4"):
        run_script(LAB, ranks=3)
