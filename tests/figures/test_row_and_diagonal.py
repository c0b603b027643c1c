"""Each state of the front page's figure is what torch does with the same four samples."""

import pytest
import torch
import torch.distributed as dist
from figures.test_one_step_logic import flat_gradient, model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.book.row_and_diagonal import (
    SAMPLES,
    STATES,
    WEIGHTS,
    State,
    compared,
    description,
    gradient,
    optimizers_get,
    outcomes,
    weights,
)
from labkit.launch import project_root, run_ranks
from labkit.testing.compare import ratio_and_cosine
from miniddp.extras.comm_hooks import total


def losses_of(network: nn.Module, samples: Tensor) -> Tensor:
    x, y = samples.double().T.unsqueeze(-1)
    return (network(x) - y).square()


def stepped(rank: int, states: list[State]) -> list[Tensor]:
    """For each state with this number of ranks: what this rank's optimizer gets."""
    found = []
    for state in states:
        ddp = DistributedDataParallel(model(*WEIGHTS))
        if state.combined == "sum":
            ddp.register_comm_hook(None, total)
        own = torch.tensor(SAMPLES).split(state.counts)[rank]
        losses = losses_of(ddp.module if state.combined == "nothing" else ddp, own)
        # The text in the figure is the code.
        names = {"losses": losses, "N": len(SAMPLES), "W": dist.get_world_size()}
        eval(state.loss, names).backward()
        found.append(flat_gradient(ddp.module))
    return found


def whole() -> Tensor:
    """The gradient of one process with all samples."""
    one = model(*WEIGHTS)
    losses_of(one, torch.tensor(SAMPLES)).mean().backward()
    return flat_gradient(one)


def test_the_gradient_of_one_process_is_autograds():
    assert torch.equal(torch.tensor(gradient([0.25] * 4)).double(), whole())


@pytest.mark.parametrize("w", [2, 4])
def test_every_state_is_what_torchs_ddp_hands_the_optimizer(w):
    states = [state for state in STATES.values() if len(state.counts) == w]
    assert states
    for rank, found in enumerate(run_ranks(stepped, w, states, device="cpu")):
        for state, result in zip(states, found, strict=True):
            mine = rank if state.combined == "nothing" else 0
            shown = torch.tensor(optimizers_get(state)[mine], dtype=torch.float64)
            assert torch.allclose(shown, result, rtol=1e-12), state
            wanted = ratio_and_cosine([result], [whole()])[:2]
            assert outcomes(state)[mine][:2] == pytest.approx(wanted), state


def test_adam_steps_with_the_sum_as_with_the_average_and_sgd_does_not():
    [shown] = optimizers_get(STATES["adam-hides-it"])
    moved = {}
    for optimizer in (torch.optim.SGD, torch.optim.Adam):
        for name, found in (("sum", shown), ("right", whole().tolist())):
            network = model(*WEIGHTS)
            for parameter, value in zip(network.parameters(), found, strict=True):
                parameter.grad = torch.full_like(parameter, value)
            before = [one.detach().clone() for one in network.parameters()]
            optimizer(network.parameters(), lr=0.01).step()
            steps = zip(before, network.parameters(), strict=True)
            moved[optimizer, name] = tuple((old - new).item() for old, new in steps)
    for index, optimizer in enumerate((torch.optim.SGD, torch.optim.Adam)):
        found = compared(moved[optimizer, "sum"], moved[optimizer, "right"])
        assert outcomes(STATES["adam-hides-it"])[index] == pytest.approx(found)


def test_a_picture_says_in_words_what_it_shows():
    state = STATES["unequal-counts"]
    assert [str(weight) for weight in weights(state)] == ["1/2", "1/6", "1/6", "1/6"]
    assert "1/2, 1/6, 1/6, 1/6" in description(state)
    assert "turned, ratio 1.11, cosine 0.80" in description(state)
    [outcome] = outcomes(state)
    page = (project_root() / "book" / "index.md").read_text()
    assert f"turns by {abs(outcome.angle):.0f}°" in page
