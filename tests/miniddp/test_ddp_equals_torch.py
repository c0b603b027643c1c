"""The differential test: both wrappers against torch's DistributedDataParallel, bit for bit.

Each case trains a model for several steps in the same ranks from the same start on the same data:
once under each wrapper. Every gradient after a step's last backward, and every parameter and buffer
after every optimizer step, is compared on every rank. Data differ between ranks and steps.

Nothing is exempt from bitwise equality: at three and more ranks that requires the same bucket
layout as torch's (gloo's order of addition depends on an element's place in the message), at any
world size the same arithmetic (1/W times the gradient for a copy, division for one in place).
"""

from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.testing.invariants import INVARIANTS, communication_overlaps_backward, violations
from miniddp import MiniDDP
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.ddp_models import MODELS, loss_of
from tests.miniddp.beside_torch import CPU, MODES, seeded, wrappers

SOME_MODES = ["plain", "accumulation, views", "unused parameters"]
OTHER_MODES = [mode for mode in MODES if mode not in SOME_MODES]


@pytest.mark.parametrize(
    ("world_size", "modes"),
    [
        pytest.param(3, SOME_MODES, id="3 ranks"),
        pytest.param(3, OTHER_MODES, id="3 ranks, other modes", marks=pytest.mark.slow),
        pytest.param(4, SOME_MODES, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_training_is_bitwise_equal_to_torchs_in_every_mode(world_size, modes):
    for found in run_ranks(wrappers, world_size, modes, list(MODELS), timeout=600, device="cpu"):
        for mode, distances in found.items():
            assert len(distances) >= len(MODELS) - 2
            assert {name: d for name, d in distances.items() if not d.bitwise} == {}, mode


def test_a_static_graph_with_dataclass_outputs_is_reduced_where_torch_leaves_gradients_local():
    def work(rank: int) -> list[torch.Tensor]:
        module = seeded("nested outputs", CPU)
        torch.manual_seed(rank)
        batch, found = MODELS["nested outputs"].batch(4), []
        for wrap in (DropIn, DistributedDataParallel):
            wrapped = wrap(seeded("nested outputs", CPU), static_graph=True)
            loss_of(wrapped(batch)).backward()
            found.append(wrapped.module.stem.weight.grad)
        loss_of(module(batch)).backward()
        return [*found, module.stem.weight.grad]

    per_rank = run_ranks(work, 2)
    true_average = sum(local for _, _, local in per_rank) / 2
    for ours, torchs, local in per_rank:
        torch.testing.assert_close(ours, true_average)
        assert torch.equal(torchs, local)


def test_both_wrappers_obey_what_every_implementation_must_and_overlap_with_buckets_of_any_size():
    def work():
        # The others follow from training as torch's DDP does, bit for bit.
        follow = {"gradients_are_identical", "replicas_stay_identical"}
        follow |= {f"{what}_equals_full_batch" for what in ("accumulation", "clipping")}
        follow |= {"uneven_items_equal_full_batch"}
        checks = [one for one in INVARIANTS if one.__name__ not in follow]
        checks.append(communication_overlaps_backward)
        small_views = {"bucket_cap_mb": 0.0003, "gradient_as_bucket_view": True}
        ways = [
            partial(wrapper, find_unused_parameters=True, **settings)
            for wrapper in (MiniDDP, DropIn)
            for settings in ({}, small_views)
        ]
        return [violations(wrap, invariants=checks) for wrap in ways]

    assert run_ranks(work, 3, timeout=600, device="cpu") == [[{}] * 4] * 3
