"""Local SGD and DiLoCo against DDP, torch's PostLocalSGDOptimizer, and workers in one process."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from labkit.launch.ranks import run_ranks
from miniddp.extras.local_updates import DiLoCo, LocalSGD
from tests.miniddp.beside_torch import CPU, UPDATES, batch, build, train, with_local_updates


def on_ranks(rank: int, kinds: list[str], every: int) -> list[list[Tensor]]:
    """The weights at the end, by kind."""
    return [with_local_updates(rank, CPU, kind, every) for kind in kinds]


def workers(kind: str, every: int) -> list[Tensor]:
    """Two workers in one process."""
    models = [build(), build()]
    inner = [SGD(m.parameters(), lr=0.1, momentum=0.5) for m in models]
    common = copy.deepcopy(models[0])
    outer = SGD(common.parameters(), nesterov=True, lr=0.7, momentum=0.9)
    for step in range(UPDATES):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            model(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for start, a, b in zip(*(m.parameters() for m in (common, *models)), strict=True):
                start.grad = (start - a) / 2 + (start - b) / 2
                if kind == "local":
                    start.copy_(a / 2 + b / 2)
            if kind == "diloco":
                outer.step()
            for model in models:
                model.load_state_dict(common.state_dict())
    return [p.detach() for p in models[0].parameters()]


def test_two_ranks_do_what_two_workers_do_in_one_process_and_torchs_does_bit_for_bit():
    local, diloco = workers("local", 3), workers("diloco", 3)
    for found in run_ranks(on_ranks, 2, ["local", "diloco", "torch"], 3):
        for ours, wanted in zip(found, (local, diloco, local), strict=True):
            assert all(map(torch.equal, ours, wanted))


def test_synchronized_at_every_step_it_is_ddp_up_to_rounding():
    for local, diloco, ddps in run_ranks(on_ranks, 3, ["local", "plain", "ddp"], 1):
        torch.testing.assert_close(local, ddps, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(diloco, ddps, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_a_training_goes_on_where_it_was_saved(kind):
    def start() -> tuple[nn.Module, Any]:
        model = build()
        return model, kind(SGD(model.parameters(), lr=0.1, momentum=0.5), 4)

    def work(rank: int) -> None:
        mine = [batch(rank, step) for step in range(UPDATES)]
        model, optimizer = start()
        train(model, optimizer, mine, CPU)  # the sixth step is the second of a round
        resumed, other = start()
        resumed.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, mine, CPU)
        train(resumed, other, mine, CPU)
        assert all(map(torch.equal, model.parameters(), resumed.parameters()))

    run_ranks(work, 2)


def test_an_interval_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        LocalSGD(SGD(build().parameters()), every=0)
