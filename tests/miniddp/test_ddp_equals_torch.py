"""The differential test: both wrappers against torch's DistributedDataParallel, bit for bit.

Each case trains a model for several steps, twice in the same ranks from the same start on the same
data: once under each wrapper. Every gradient after every backward, and every parameter and buffer
after every optimizer step, is compared on every rank. Data differ between ranks and steps.

Nothing is exempt from bitwise equality: at three and more ranks that requires the same bucket
layout as torch's (gloo's order of addition depends on an element's place in the message), at any
world size the same arithmetic (1/W times the gradient for a copy, division for one in place).
"""

import copy
from itertools import product

import pytest
import torch
from ddp_models import MODELS, dense_gradients, loss_of, torchs_ddp_takes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from miniddp import MiniDDP
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

STEPS = 3
MODES = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "accumulation of 4": {},
    "accumulation of 4, views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "unused parameters, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, unused parameters, small buckets": {
        "static_graph": True,
        "find_unused_parameters": True,
        "bucket_cap_mb": 0.001,
    },
    "small buckets": {"bucket_cap_mb": 0.001},
    "a list of caps": {"bucket_cap_mb_list": [0.0005, 0.002]},
}
SOME_MODES = ["plain", "views", "accumulation of 4", "unused parameters"]
OTHER_MODES = [mode for mode in MODES if mode not in SOME_MODES]


# What the core's class leaves to the drop-in: keywords, and sparse gradients.
OF_THE_DROP_IN = {"static_graph", "bucket_cap_mb_list"}
SPARSE = {"sparse embedding"}


def wrappers_for(name: str, mode: str) -> list[type[nn.Module]]:
    """The project's classes that take the case."""
    core = not OF_THE_DROP_IN & set(MODES[mode]) and name not in SPARSE
    return [DropIn, MiniDDP] if core else [DropIn]


def train(wrapped: nn.Module, draw, rank: int, mode: str) -> list:
    """Train for STEPS steps; what was seen: gradients and state after each of them."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(1000 * rank + step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        micro_batches = 4 if mode.startswith("accumulation") else 1
        for micro in range(micro_batches - 1):
            with wrapped.no_sync():
                loss_of(wrapped(draw(4 + micro))).backward()
        loss_of(wrapped(draw(5))).backward()
        seen.append(dense_gradients(wrapped))
        optimizer.step()
        seen.append([t.detach().clone() for t in wrapped.state_dict().values()])
    return seen


def differences(ours: list, theirs: list) -> list[str]:
    """Where two trainings differ in a single bit, and by how much."""
    found = []
    for moment, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            if (x is None) != (y is None):
                found.append(f"moment {moment}, tensor {index}: {x} and {y}")
            elif x is not None and not torch.equal(x, y):
                worst = (x - y).abs().max().item()
                found.append(f"moment {moment}, tensor {index}: by up to {worst:.1e}")
    return found


def compare_in_ranks(rank: int, modes: list[str]) -> None:
    for mode, (name, (build, draw)) in product(modes, MODELS.items()):
        if not torchs_ddp_takes(name, mode):
            continue
        print(mode, name)  # shown if the call fails, and then the last one is the culprit
        torch.manual_seed(7)
        module = build()
        theirs = train(
            DistributedDataParallel(copy.deepcopy(module), **MODES[mode]), draw, rank, mode
        )
        for wrapper in wrappers_for(name, mode):
            ours = train(wrapper(copy.deepcopy(module), **MODES[mode]), draw, rank, mode)
            assert differences(ours, theirs) == [], (mode, name, wrapper.__name__)


@pytest.mark.parametrize(
    ("world_size", "modes"),
    [
        pytest.param(2, SOME_MODES, id="2 ranks", marks=pytest.mark.slow),
        pytest.param(3, SOME_MODES, id="3 ranks"),
        pytest.param(3, OTHER_MODES, id="3 ranks, other modes", marks=pytest.mark.slow),
        pytest.param(4, SOME_MODES, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_training_is_bitwise_equal_to_torchs_in_every_mode(world_size, modes):
    run_ranks(compare_in_ranks, world_size, modes, timeout=600)


def first_gradients_of_a_static_graph(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    build, draw = MODELS["nested outputs"]
    torch.manual_seed(7)
    module = build()
    torch.manual_seed(rank)
    batch = draw(4)
    found = []
    for wrap in (DropIn, DistributedDataParallel):
        wrapped = wrap(copy.deepcopy(module), static_graph=True)
        loss_of(wrapped(batch)).backward()
        found.append(wrapped.module.stem.weight.grad)
    loss_of(module(batch)).backward()
    return *found, module.stem.weight.grad


def test_a_static_graph_with_dataclass_outputs_is_reduced_where_torch_leaves_gradients_local():
    per_rank = run_ranks(first_gradients_of_a_static_graph, 2)
    true_average = sum(local for _, _, local in per_rank) / 2
    for ours, torchs, local in per_rank:
        torch.testing.assert_close(ours, true_average)
        assert torch.equal(torchs, local)
