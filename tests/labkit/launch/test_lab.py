"""What labs under torchrun share; the labs' own tests show the rest."""

import math

import pytest
import torch

from labkit.launch.lab import largest_on_any_rank, place_of_rank
from labkit.launch.ranks import run_ranks


def test_the_largest_figure_is_found_on_whichever_rank_it_is_and_known_to_all():
    def largest(rank):
        return largest_on_any_rank(0.5, rank % 2 * 3.25)

    assert run_ranks(largest, 3) == [3.25] * 3


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("figures", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_of_one_rank_is_the_largest_for_all(where, figures):
    def largest(rank):
        return largest_on_any_rank(*(figures if rank == where else (2.0, 3.0)))

    assert all(map(math.isnan, run_ranks(largest, 3)))


@pytest.mark.parametrize(
    ("asked", "gpus", "device", "backend"),
    [
        ("auto", 2, "cuda:1", "cpu:gloo,cuda:nccl"),
        ("auto", 1, "cpu", "gloo"),
        ("cuda", 2, "cuda:1", "cpu:gloo,cuda:nccl"),
        ("cuda", 1, "cuda:0", "gloo"),
        ("cpu", 2, "cpu", "gloo"),
    ],
)
def test_ranks_have_their_own_gpus_or_the_cpu_and_share_gpus_only_when_told_to(
    monkeypatch, asked, gpus, device, backend
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LABKIT_DEVICE", asked)
    found, over = place_of_rank(1, 2)
    assert (str(found), over) == (device, backend)


@pytest.mark.parametrize(("asked", "said"), [("cuda", "torch sees no GPU"), ("gpu", "must be")])
def test_a_device_that_a_lab_cannot_have_is_refused(monkeypatch, asked, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("LABKIT_DEVICE", asked)
    with pytest.raises(SystemExit, match=said):
        place_of_rank(0, 2)
