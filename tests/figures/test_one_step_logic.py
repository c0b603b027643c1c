"""The figure "One step, live" shows what autograd computes, and what real ranks end with."""

import contextlib
import math
import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from figures.node import call
from figures.one_step import (
    Step,
    StepGradients,
    after_one_update,
    batches_of_rank,
    gradients_of_step,
    loss_of_batch,
    model,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from labkit.launch import run_ranks
from labkit.testing.compare import ratio_and_cosine
from labkit.testing.verdict import kind_of
from miniddp.extras.comm_hooks import total

CASES = 800
START = {
    "w": 2,
    "samples": [[2, 5, -1, 2], [-2, 0, 1, 2], [3, 2, -3, 1], [0, 4, -2, 3]],
    "divide": "own",
    "factor": "1",
    "combine": "average",
    "through": "ddp",
    "accumulate": "off",
    "over_k": True,
    "absent": "none",
}


def random_state(generator: random.Random) -> dict:
    w = generator.randint(1, 4)
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


def step_of(state: dict) -> Step:
    w = state["w"]
    flat = state["samples"][:w]
    return Step(
        tuple(tuple(zip(own[::2], own[1::2], strict=True)) for own in flat),
        divide=state["divide"],
        factor={"1": 1.0, "W": float(w), "1/W": 1 / w}[state["factor"]],
        combine=state["combine"],
        wrapped=state["through"] == "ddp",
        accumulate=state["accumulate"],
        over_k=state["over_k"],
        absent=state["absent"],
    )


def states() -> list[dict]:
    generator = random.Random(7)
    return [random_state(generator) for _ in range(CASES)]


def shown(cases: list[dict]) -> list[dict]:
    return call("one_step", "step", [(case,) for case in cases])


def near(found: list, wanted: torch.Tensor | list[torch.Tensor]) -> bool:
    wanted = torch.stack(wanted) if isinstance(wanted, list) else wanted
    return bool(
        torch.allclose(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-9, atol=1e-9)
    )


@pytest.fixture(scope="module")
def both() -> list[tuple[dict, dict, StepGradients]]:
    cases = states()
    found = shown(cases)
    return [
        (case, one, gradients_of_step(step_of(case)))
        for case, one in zip(cases, found, strict=True)
    ]


def test_every_gradient_is_the_one_of_autograd(both):
    for case, found, outcome in both:
        assert near(found["local"], outcome.local), case
        assert near(found["truth"], outcome.truth), case
        if case["w"] > 1 or step_of(case).synchronizes:
            assert near(found["final"], outcome.final), case


def test_ratio_cosine_and_kind_are_those_of_the_book(both):
    kinds = Counter()
    for case, found, outcome in both:
        for rank, final in enumerate(outcome.final):
            ratio, cosine, kind = (found[name][rank] for name in ("ratio", "cosine", "kind"))
            kinds[kind] += 1
            if not final.any() or not outcome.truth.any():
                assert cosine is None, case
                continue
            wanted = ratio_and_cosine([final], [outcome.truth])
            assert math.isclose(ratio, wanted.ratio, rel_tol=1e-9), case
            assert math.isclose(cosine, wanted.cosine, rel_tol=1e-9, abs_tol=1e-9), case
            assert kind == kind_of(wanted), case
    assert min(kinds[kind] for kind in ("right", "scale bug", "direction bug")) > 50, kinds


def test_sgd_and_adam_move_the_weights_as_torch_moves_them(both):
    for case, found, outcome in both[:300]:
        for name, optimizer in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)):
            wanted = [after_one_update(final, optimizer) for final in outcome.final]
            assert near(found[name], wanted), case
            assert near(found[f"{name}_truth"], after_one_update(outcome.truth, optimizer)), case


# The factor that each leaf of the chapter names; None: no factor repairs it.
LEAVES = {1: "1", 2: None, 3: "W", 4: "W", 10: "1", 11: "1/W"}


def test_the_row_of_the_table_names_the_factor_that_is_right():
    generator = random.Random(11)
    cases = [random_state(generator) | {"factor": "1"} for _ in range(CASES)]
    seen = Counter()
    for case, found in zip(cases, shown(cases), strict=True):
        leaf = found["leaf"]
        seen[leaf] += 1
        if leaf == 0 or case["w"] == 1 or found["cosine"][0] is None:
            continue
        right = LEAVES[leaf]
        if right is None:  # a mean of unequal means may be right by chance, and is so rarely
            continue
        for factor in ("1", "W", "1/W"):
            outcome = gradients_of_step(step_of(case | {"factor": factor}))
            comparison = ratio_and_cosine([outcome.final[0]], [outcome.truth])
            assert (kind_of(comparison) == "right") == (factor == right), (case, factor)
    assert set(seen) == {0, *LEAVES}
    assert min(seen.values()) > 5, seen


def on_a_rank(rank, world_size, step):
    """One real step: the gradient that the optimizer of this rank would get."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model())
    if step.combine == "sum":
        ddp.register_comm_hook(None, total)
    network = ddp if step.wrapped else ddp.module
    batches = [batch for batch in batches_of_rank(step, step.present[rank]) if batch]
    silent = {"never": len(batches), "last": len(batches) - 1}.get(step.accumulate, 0)
    joined = (
        Join([ddp], divide_by_initial_world_size=step.absent == "zeros")
        if step.absent != "none"
        else contextlib.nullcontext()
    )
    with joined:
        for number, batch in enumerate(batches):
            with ddp.no_sync() if number < silent else contextlib.nullcontext():
                loss_of_batch(step, network, batch).backward()
    dist.barrier()
    if not batches:
        return None
    return torch.cat([ddp.module.weight.grad.view(-1), ddp.module.bias.grad])


REAL = {
    "right": {},
    "unequal counts": {"samples": [[2, 5], [-2, 0, 1, 2, 0, 0], *START["samples"][2:]]},
    "count of all, four ranks": {"w": 4, "divide": "all"},
    "count of all times W": {"w": 3, "divide": "all", "factor": "W"},
    "a sum": {"divide": "none"},
    "the module is called": {"w": 3, "through": "module"},
    "accumulation": {"accumulate": "last", "w": 3},
    "accumulation, every backward synchronizes": {"accumulate": "each", "w": 3},
    "accumulation, no backward synchronizes": {"accumulate": "never"},
    "a rank without samples": {"w": 3, "absent": "zeros"},
    "a rank without samples, others divide": {"w": 3, "absent": "active"},
    "summed": {"combine": "sum"},
    "summed, and every backward synchronizes": {"combine": "sum", "accumulate": "each", "w": 3},
}


@pytest.mark.parametrize("name", REAL)
def test_the_figure_shows_what_real_ranks_of_torchs_ddp_compute(name):
    state = START | REAL[name]
    step = step_of(state)
    found = run_ranks(on_a_rank, state["w"], step)
    (figure,) = shown([state])
    for rank, gradient in enumerate(found):
        if gradient is not None:
            assert near(figure["final"][rank], gradient), rank
