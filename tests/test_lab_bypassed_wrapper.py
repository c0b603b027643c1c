"""The bypassed wrapper: the toy, its lab under torchrun, and what its fixes have to agree on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.launch.ranks import run_ranks
from labkit.launch.scripts import ScriptError, run_script
from labkit.scenarios.unwrapped_loss import (
    FIXES,
    LEARNING_RATE,
    PRINTED_DRIFT,
    PRINTED_GRADIENTS,
    draw_inputs_and_targets,
    trajectory,
)

LAB = "labs/bypassed_wrapper.py"


def every_trajectory(rank, seed):
    return {fix: trajectory(fix, seed=seed) for fix in FIXES}


def on_one_process(seed: int) -> list[float]:
    """The gradient of weight[0] at each step, from both ranks' batches together."""
    torch.manual_seed(seed)
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    found = []
    for step in range(5):
        x, y = (
            torch.cat(parts)
            for parts in zip(*(draw_inputs_and_targets(rank, step) for rank in (0, 1)), strict=True)
        )
        optimizer.zero_grad()
        ((module(x) - y) ** 2).mean().backward()
        found.append(module.weight.grad.flatten()[0].item())
        optimizer.step()
    return found


def test_all_thirty_printed_numbers_come_out_on_both_ranks():
    for found in run_ranks(every_trajectory, 2, 0, device="cpu"):
        for fix in ("none", "all-reduce"):
            for step, gradients, drift in zip(
                found[fix], PRINTED_GRADIENTS[fix], PRINTED_DRIFT[fix], strict=True
            ):
                assert [f"{g:.5f}" for g in step.gradients] == [f"{g:.5f}" for g in gradients]
                assert f"{step.drift:.6f}" == f"{drift:.6f}"


@pytest.mark.parametrize("seed", [0, 5])
def test_every_fix_gives_the_full_batch_of_one_process_and_the_bug_does_not(seed):
    wanted = on_one_process(seed)
    for found in run_ranks(every_trajectory, 2, seed, device="cpu"):
        for fix in FIXES:
            pairs = list(zip(found[fix], wanted, strict=True))
            if fix == "none":
                assert all(step.gradients[0] != step.gradients[1] for step in found[fix])
                assert all(abs(g - w) > 1e-3 for step, w in pairs for g in step.gradients)
                assert all(step.drift > 0.01 for step in found[fix])
            else:
                assert all(step.drift == 0 for step in found[fix])
                assert all(abs(g - w) < 1e-6 for step, w in pairs for g in step.gradients)


def test_other_worlds_and_other_fixes_are_refused():
    def refused(world_size):
        with pytest.raises(ValueError, match=f"runs on 2 ranks, got {world_size}"):
            trajectory("none")
        fixes = "none, all-reduce, wrapper, prepared"
        with pytest.raises(ValueError, match=f"one of {fixes}, got 'hope'"):
            trajectory("hope")

    run_ranks(refused, 1)
    run_ranks(refused, 3)


def test_the_debug_level_given_to_run_ranks_reaches_torch():
    def level(rank):
        return dist.get_debug_level().name

    assert run_ranks(level, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) == ["DETAIL"] * 2
    assert run_ranks(level, 2, env={"TORCH_DISTRIBUTED_DEBUG": "OFF"}) == ["OFF"] * 2


def test_the_lab_prints_both_tables_with_every_number_equal():
    lines = run_script(LAB, "--fix", "wrapper", ranks=2).splitlines()
    rows = [line.split() for line in lines if line.startswith(("bypassed", "fixed: wrapper"))]
    assert len(rows) == 30
    assert all(row[-1] == "yes" and row[-2] == row[-3] for row in rows)
    printed = [f"{g:.5f}" for name in PRINTED_GRADIENTS for s in PRINTED_GRADIENTS[name] for g in s]
    printed += [f"{drift:.6f}" for name in PRINTED_DRIFT for drift in PRINTED_DRIFT[name]]
    assert [row[-2] for row in rows] == printed


def test_the_lab_fails_where_nothing_is_fixed():
    said = (
        "Not every number is the one that the pull request printed.\n\nThe fixed replicas diverge"
    )
    with pytest.raises(ScriptError, match=said):
        run_script(LAB, "--fix", "none", ranks=2)


def test_with_another_seed_the_lab_prints_other_numbers_and_compares_with_none():
    output = run_script(LAB, "--seed", "5", ranks=2)
    assert "printed" not in output
    assert "equal" not in output
    for pairs in PRINTED_GRADIENTS.values():
        assert not any(f"{g:.5f}" in output for pair in pairs for g in pair)
    fixed = [line.split() for line in output.splitlines() if line.startswith("fixed: all-reduce")]
    wanted = [f"{g:.5f}" for g in on_one_process(5)]
    assert [row[-1] for row in fixed[:10:2]] == wanted
    assert [row[-1] for row in fixed[1:10:2]] == wanted
    assert [row[-1] for row in fixed[10:]] == ["0.000000"] * 5


def test_on_another_number_of_ranks_the_lab_says_how_to_start_it():
    with pytest.raises(ScriptError, match=r"has 2 ranks, not 3\. Start it with"):
        run_script(LAB, ranks=3)
