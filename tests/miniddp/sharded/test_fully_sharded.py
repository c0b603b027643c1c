"""`fully_shard` against torch's, `MiniDDP`, and one process, on models with one trait each.

Data differ between ranks and steps. On two ranks, everything is bitwise equal, because a sum of
two numbers does not depend on their order; on three and four, up to rounding.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from labkit.launch.ranks import run_ranks
from miniddp import MiniDDP
from miniddp.sharded import (
    clip_grad_norm_,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from tests.ddp_models import MODELS, POLICIES, Model, loss_of, whole
from tests.miniddp.beside_torch import CPU, distance, mesh_of, seeded, shard, train_sharded
from tests.on_ranks import on_ranks


class Lora(nn.Module):
    """A frozen matrix with a trainable update of rank 1, and a bias with fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.down = nn.Linear(12, 1, bias=False)
        self.up = nn.Linear(1, 12, bias=False)
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.frozen(x) + self.up(self.down(x))))


class InPlace(nn.Module):
    """Its first operation overwrites its input."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 9)
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(9, 9), nn.Linear(9, 3))

    def forward(self, x):
        return self.block(self.stem(x))


class TwoNames(nn.Module):
    """One parameter has two names in one module."""

    def __init__(self):
        super().__init__()
        self.weight = self.again = nn.Parameter(torch.randn(3, 12))

    def forward(self, x):
        return nn.functional.linear(x, self.weight) * nn.functional.linear(x, self.again)


ALL = MODELS | {
    "lora": Model(Lora, MODELS["mlp"].batch),
    "in place": Model(InPlace, MODELS["mlp"].batch),
    "two names": Model(TwoNames, MODELS["mlp"].batch),
}
# A scalar has no rows, and a message of gradients has no complex numbers or gaps.
REFUSED = {"odd shapes", "convolution", "complex"}
# torch's: needs one dtype per group, leaves the second dtype out of an all-reduce, or raises.
NOT_IN_TORCH = {"mixed dtypes", "sparse embedding", "branches", "in place"}


def compare_models(rank: int, world_size: int) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    # torch's SGD rounds bfloat16 at the end of a tensor otherwise than in its middle; torch
    # reduces a parameter that is used twice in two messages, and each is a rounded average.
    wider = {"mixed dtypes": 2e-2, "a parameter used twice": 1e-6}
    for name in (name for name in ALL if name not in REFUSED):
        build, draw = ALL[name]
        torch.manual_seed(7)
        module = build()
        # In `MiniDDP` a forward under no_sync must be like the one that ends it.
        micro_batches = (1, 1, 1) if name == "branches" else (2, 1, 2)
        ways = [fully_shard, *[torchs_fully_shard] * (name not in NOT_IN_TORCH)]
        models = [shard(copy.deepcopy(module), name, how) for how in ways]
        if name != "sparse embedding":  # ours alone takes it; `dense embedding` has the numbers
            models.append(MiniDDP(module, find_unused_parameters=name == "branches"))
        ours, *others = (train_sharded(m, draw, rank, CPU, micro_batches) for m in models)
        bound = max(0.0 if world_size == 2 else 1e-4, wider.get(name, 0.0))
        for model, theirs in zip(models[1:], others, strict=True):
            assert distance(ours, theirs).largest <= bound, f"{name}, {type(model).__name__}"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_equals_torchs_and_ddps(world_size):
    run_ranks(compare_models, world_size, timeout=600)


def options_of(name: str) -> dict[str, Any]:
    if name in POLICIES:
        return {"mp_policy": POLICIES[name]}
    if name.startswith("hybrid"):
        return {"mesh": mesh_of(CPU, 2, 2)}
    return {"reshard_after_forward": name != "kept whole"}


def compare_options(rank: int, names: list[str]) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in names:
        kind = "transformer" if name == "bfloat16, reduced in float32" else "mlp"
        draw, seen, norms, clipped = MODELS[kind].batch, [], [], []
        for how in (fully_shard, torchs_fully_shard):
            model = shard(seeded(kind, CPU), kind, how, **options_of(name))
            if name == "divided by 3":
                model.set_gradient_divide_factor(3.0)
                if how is torchs_fully_shard:  # gloo cannot multiply before it sums
                    model.set_force_sum_reduction_for_comms(True)
            if name == "hybrid, late all-reduce":
                torch.manual_seed(100 + rank)
                model.set_requires_all_reduce(False)
                loss_of(model(draw(4))).backward()
                model.set_requires_all_reduce(True)
            seen.append(train_sharded(model, draw, rank, CPU, (2, 1, 2)))
            clip = clip_grad_norm_ if how is fully_shard else nn.utils.clip_grad_norm_
            norm = clip(model.parameters(), 1e-3)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            clipped.append([whole(p.grad, p) for p in model.parameters()])
        assert distance(*clipped).largest < 1e-6, name
        assert distance(*seen).bitwise, name
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, [*POLICIES, "kept whole", "divided by 3"]), (4, ["hybrid", "hybrid, late all-reduce"])],
)
def test_options_do_what_they_do_in_torch(world_size, names):
    run_ranks(compare_options, world_size, names, timeout=300)


def batches(count: int, draw) -> list[torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return [draw(4) for _ in range(count)]


def train_and_save(rank: int, world_size: int) -> tuple[dict, dict]:
    build, draw = MODELS["mlp"]
    torch.manual_seed(rank)  # rank 0's values are broadcast
    model = shard(build(), "mlp", fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model(batches(world_size, draw)[rank])).backward()
    optimizer.step()
    return full_state_dict(model), full_optimizer_state_dict(model, optimizer)


def resume(rank: int, world_size: int, saved: tuple[dict, dict]) -> dict:
    build, draw = MODELS["mlp"]
    model = shard(build(), "mlp", fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load_full_state_dict(model, saved[0])
    load_full_optimizer_state_dict(model, optimizer, saved[1])
    loss_of(model(batches(world_size, draw)[rank])).backward()
    optimizer.step()
    return full_state_dict(model)


def test_what_three_ranks_save_two_ranks_resume_as_one_process_would():
    saved = run_ranks(train_and_save, 3)
    for other in saved[1:]:
        assert str(other) == str(saved[0])
    resumed = run_ranks(resume, 2, saved[0])
    build, draw = MODELS["mlp"]
    alone = build()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.5)
    alone.load_state_dict(saved[0][0])
    names = {name: index for index, (name, _) in enumerate(alone.named_parameters())}
    state = {names[name]: values for name, values in saved[0][1]["state"].items()}
    groups = [{**g, "params": list(names.values())} for g in saved[0][1]["param_groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    loss_of(alone(torch.cat(batches(2, draw)))).backward()
    optimizer.step()
    for found in resumed:
        torch.testing.assert_close(found, dict(alone.state_dict()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_forward_without_a_backward_leaves_no_old_parameters_to_the_next_one(rank: int) -> None:
    build, draw = MODELS["mlp"]
    for reshard in (True, False, None):
        model = shard(build(), "mlp", fully_shard, reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(rank)
        batch = draw(4)
        loss_of(model(batch)).backward()
        model(batch)
        optimizer.step()
        outputs = model(batch).detach()
        alone = build()
        alone.load_state_dict(full_state_dict(model))
        torch.testing.assert_close(outputs, alone(batch).detach())


@on_ranks(2)
def test_a_step_after_interruptions_and_with_two_forwards_per_backward_is_right(rank: int):
    build, draw = MODELS["mlp"]

    def new(how: Any) -> nn.Module:
        torch.manual_seed(7)
        return shard(build(), "mlp", how)

    def batch_of(rank: int) -> torch.Tensor:
        torch.manual_seed(rank)
        return draw(4)

    batch, alone = batch_of(rank), new(lambda part: part)
    for other in map(batch_of, range(2)):
        ((loss_of(alone(other)) + loss_of(alone(other / 2))) / 2).backward()
    for fails in (False, True):
        model = new(fully_shard)
        if fails:
            with pytest.raises(RuntimeError):
                model(torch.randn(2, 5))
            output = model(batch)
            output.register_hook(lambda gradient: (_ for _ in ()).throw(RuntimeError("stop")))
            with pytest.raises(RuntimeError, match="stop"):
                output.sum().backward()
            with torch.no_grad():
                model(batch)
            model.zero_grad()
        (loss_of(model(batch)) + loss_of(model(batch / 2))).backward()
        for sharded, parameter in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(sharded.grad, sharded), parameter.grad)
