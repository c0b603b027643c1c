"""The figure "One step, live" shows what real ranks end with, and what torch makes of it."""

import contextlib
import math
import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from figures.node import call
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from labkit.launch import run_ranks
from labkit.testing.compare import gradients, kind_of, ratio_and_cosine
from miniddp.extras.comm_hooks import total


def random_state(generator: random.Random, w: int) -> dict:
    counts = [generator.randint(2, 4) for _ in range(4)]
    if generator.random() < 0.5:
        counts = [counts[0]] * 4
    accumulate = generator.choice(["off", "off", "last", "each", "never"])
    if accumulate == "off":
        counts = [count - 1 for count in counts]
    return {
        "w": w,
        "samples": [[generator.randint(-6, 12) / 2 for _ in range(2 * c)] for c in counts],
        "divide": generator.choice(["own", "all", "none"]),
        "factor": generator.choice(["1", "W", "1/W"]),
        "combine": generator.choice(["average", "sum"]),
        "through": generator.choice(["ddp", "ddp", "ddp", "module"]),
        "accumulate": accumulate,
        "over_k": generator.random() < 0.7,
        "absent": generator.choice(["none", "none", "zeros", "active"]) if w > 1 else "none",
    }


def shown(cases: list[dict]) -> list[dict]:
    return call("one_step", "step", [(case,) for case in cases])


def near(found: list, wanted: Tensor) -> bool:
    found = torch.tensor(found, dtype=torch.float64)
    return torch.allclose(found, wanted, rtol=1e-9, atol=1e-9)


def model(a: float = 0.5, b: float = 2.0) -> nn.Linear:
    """a·x + b, by default with the starting weights of the figure."""
    linear = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.fill_(a)
        linear.bias.fill_(b)
    return linear


def samples_of(state: dict) -> list[Tensor]:
    """Each rank's samples, of shape (n, 2); none for a rank that has run out."""
    own = [torch.tensor(flat).view(-1, 2).double() for flat in state["samples"][: state["w"]]]
    return own if state["absent"] == "none" else [*own[:-1], own[-1][:0]]


def parts_of(state: dict, rank: int) -> list[Tensor]:
    """The rank's samples, as its backwards see them; the first of two has the odd one."""
    own = samples_of(state)[rank]
    parts = own.tensor_split(1 if state["accumulate"] == "off" else 2)
    return [part for part in parts if len(part)]


def loss_of(state: dict, network: nn.Module, part: Tensor) -> Tensor:
    x, y = part.T.unsqueeze(-1)
    factor = {"1": 1.0, "W": state["w"], "1/W": 1 / state["w"]}[state["factor"]]
    means = 2 if state["accumulate"] != "off" and state["over_k"] else 1
    count = sum(map(len, samples_of(state)))
    divisor = {"own": len(x) * means, "all": count, "none": 1}[state["divide"]]
    return (network(x) - y).square().sum() * factor / divisor


def flat_gradient(network: nn.Module) -> Tensor:
    return torch.cat([gradient.view(-1) for gradient in gradients(network)])


def really(rank: int, states: list[dict]) -> list[tuple[Tensor, Tensor | None]]:
    """For each state: this rank's gradient before any exchange, and what its optimizer gets."""
    found = []
    for state in states:
        alone, ddp, parts = model(), DistributedDataParallel(model()), parts_of(state, rank)
        for part in parts:
            loss_of(state, alone, part).backward()
        if state["combine"] == "sum":
            ddp.register_comm_hook(None, total)
        network = ddp if state["through"] == "ddp" else ddp.module
        joined = contextlib.nullcontext()
        if state["absent"] != "none":
            joined = Join([ddp], divide_by_initial_world_size=state["absent"] == "zeros")
        silent = {"never": len(parts), "last": len(parts) - 1}.get(state["accumulate"], 0)
        with joined:
            for number, part in enumerate(parts):
                with ddp.no_sync() if number < silent else contextlib.nullcontext():
                    loss_of(state, network, part).backward()
        dist.barrier()
        found.append((flat_gradient(alone), flat_gradient(ddp.module) if parts else None))
    return found


@pytest.mark.parametrize("w", [1, 2, 3, 4])
def test_every_gradient_is_that_of_real_ranks_and_of_one_process_with_all_samples(w):
    generator = random.Random(w)
    states = [random_state(generator, w) for _ in range(60)]
    figures = shown(states)
    for rank, found in enumerate(run_ranks(really, w, states, timeout=300, device="cpu")):
        for state, figure, (local, final) in zip(states, figures, found, strict=True):
            assert near(figure["local"][rank], local), state
            assert final is None or near(figure["final"][rank], final), state
    for state, figure in zip(states, figures, strict=True):
        x, y = torch.cat(samples_of(state)).T.unsqueeze(-1)
        whole, errors = (
            model(),
            nn.MSELoss(reduction="sum" if state["divide"] == "none" else "mean"),
        )
        errors(whole(x), y).backward()
        assert near(figure["truth"], flat_gradient(whole)), state


@pytest.fixture(scope="module")
def figures() -> list[tuple[dict, dict]]:
    """800 random states, and what the figure shows of each."""
    generator = random.Random(7)
    states = [random_state(generator, generator.randint(1, 4)) for _ in range(800)]
    return list(zip(states, shown(states), strict=True))


def test_ratio_cosine_and_kind_are_those_of_the_book(figures):
    kinds = Counter()
    for state, figure in figures:
        truth = torch.tensor(figure["truth"])
        for final, ratio, cosine, kind in zip(
            *(figure[name] for name in ("final", "ratio", "cosine", "kind")), strict=True
        ):
            kinds[kind] += 1
            if not any(final) or not truth.any():
                assert cosine is None, state
                continue
            wanted = ratio_and_cosine([torch.tensor(final, dtype=torch.float64)], [truth.double()])
            assert math.isclose(ratio, wanted.ratio, rel_tol=1e-6), state
            assert math.isclose(cosine, wanted.cosine, rel_tol=1e-6, abs_tol=1e-6), state
            assert kind == kind_of(wanted), state
    assert min(kinds[kind] for kind in ("right", "scale bug", "direction bug")) > 50, kinds


def updated(gradient: list[float], optimizer: type[torch.optim.Optimizer]) -> Tensor:
    """The two weights after the first update."""
    network = model()
    for parameter, value in zip(network.parameters(), gradient, strict=True):
        parameter.grad = torch.full_like(parameter, value)
    optimizer(network.parameters(), lr=0.01).step()
    return torch.cat([parameter.detach().view(-1) for parameter in network.parameters()])


def test_sgd_and_adam_move_the_weights_as_torch_moves_them(figures):
    for state, figure in figures[:300]:
        for name, optimizer in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)):
            for new, gradient in zip(figure[name], figure["final"], strict=True):
                assert near(new, updated(gradient, optimizer)), state
            assert near(figure[f"{name}_truth"], updated(figure["truth"], optimizer)), state


# The factor that each case of the chapter names. Case 2 names none.
LEAVES = {1: "1", 3: "W", 4: "W", 10: "1", 11: "1/W"}


def test_the_row_of_the_table_names_the_factor_that_is_right(figures):
    of_factors = [shown([state | {"factor": f} for state, _ in figures]) for f in ("1", "W", "1/W")]
    seen = Counter()
    for (state, _), *by_factor in zip(figures, *of_factors, strict=True):
        leaf = by_factor[0]["leaf"]
        seen[leaf] += 1
        if leaf in LEAVES and state["w"] > 1 and by_factor[0]["cosine"][0] is not None:
            right = [one["kind"][0] == "right" for one in by_factor]
            assert right == [factor == LEAVES[leaf] for factor in ("1", "W", "1/W")], state
    assert set(seen) == {0, 2, *LEAVES}
    assert min(seen.values()) > 5, seen
