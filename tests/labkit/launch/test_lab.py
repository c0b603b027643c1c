"""What labs under torchrun share; the labs' own tests show the rest."""

import math

import pytest
import torch

from labkit.launch import lab
from labkit.launch.lab import choose_devices, join_ranks, largest_on_any_rank
from labkit.launch.ranks import run_ranks


def test_the_largest_number_of_any_rank_is_known_to_all_and_a_nan_is_the_largest():
    def largest(rank):
        nans = [
            largest_on_any_rank(*(numbers if rank == where else (2.0, 3.0)))
            for numbers in ((math.nan, 1.0), (1.0, math.nan))
            for where in range(3)
        ]
        return largest_on_any_rank(0.5, rank % 2 * 3.25), all(map(math.isnan, nans))

    assert run_ranks(largest, 3) == [(3.25, True)] * 3


@pytest.mark.parametrize(
    ("asked", "gpus", "devices", "backend"),
    [
        ("auto", 2, ("cuda:0", "cuda:1"), "cpu:gloo,cuda:nccl"),
        ("auto", 1, ("cpu", "cpu"), "gloo"),
        ("cuda", 8, ("cuda:0", "cuda:1"), "cpu:gloo,cuda:nccl"),
        ("cuda", 2, ("cuda:0", "cuda:1", "cuda:0"), "gloo"),
        ("cpu", 2, ("cpu", "cpu"), "gloo"),
    ],
)
def test_ranks_have_their_own_gpus_or_the_cpu_and_share_gpus_only_when_told_to(
    monkeypatch, asked, gpus, devices, backend
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_devices(len(devices), asked, "device") == (devices, backend)


STALE = {"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"LABKIT_DEVICE": "cuda"}, "LABKIT_DEVICE .*torch finds no GPU"),
        ({"LABKIT_DEVICE": "gpu"}, "LABKIT_DEVICE must be"),
        (STALE, "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ],
)
def test_a_device_that_a_lab_cannot_have_and_restarts_with_stale_addresses_are_refused(
    monkeypatch, environment, said
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lab, "die_with_parent", lambda: None)  # this process is no rank
    with pytest.raises(SystemExit, match=said), join_ranks():
        pass
