"""The trainer whose loss goes around its wrapper, and what a step of each fix sends."""

import pytest
import torch

from labkit.launch.ranks import run_ranks
from labkit.scenarios.bypassing_trainer import draw_samples, train_bypassing
from labkit.scenarios.communication_of_a_step import one_step


def test_bypassed_ranks_end_as_single_processes_and_wrapped_ones_agree() -> None:
    torch.manual_seed(1)
    data, held_out = draw_samples(32), draw_samples(16)
    bypassed = run_ranks(train_bypassing, 2, data, held_out, True, False, 3)
    wrapped = run_ranks(train_bypassing, 2, data, held_out, False, False, 3)
    [alone] = run_ranks(train_bypassing, 1, data, held_out, True, False, 3, 2)
    for name, weights in alone.checkpoint.items():
        assert torch.equal(bypassed[0].checkpoint[name], weights)
        assert not torch.equal(bypassed[1].checkpoint[name], weights)
        assert torch.equal(wrapped[0].checkpoint[name], wrapped[1].checkpoint[name])
        assert not torch.equal(wrapped[0].checkpoint[name], weights)
    assert bypassed[0].seen | bypassed[1].seen == set(range(32))
    assert not bypassed[0].seen & bypassed[1].seen


@pytest.mark.parametrize(
    ("fix", "during", "forwards"),
    [("all-reduce", False, 1), ("wrapper", True, 1), ("prepared", True, 2)],
)
def test_only_ddps_own_all_reduces_start_during_backward(fix, during, forwards) -> None:
    torch.manual_seed(2)
    x, y = torch.randn(16, 32), torch.randn(16, 32)
    for found in run_ranks(one_step, 2, x, y, fix):
        assert (found.during_backward > 0) == during
        assert found.forwards == forwards
