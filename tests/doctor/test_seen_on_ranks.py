"""Real ranks: what the observers write down is what the rules need."""

from collections.abc import Callable
from typing import Any

import pytest
from doctor.corpus_runs import Server
from doctor.corpus_scripts import Script

Write = Callable[..., Script]

START = """
from contextlib import nullcontext
from dataclasses import dataclass
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
gen = torch.Generator().manual_seed(rank)
def batch(n=3):
    return torch.randn(n, 4, generator=gen)
def loss_of(model, x):
    return nn.functional.mse_loss(model(x), x[:, :2])
"""
WRAPPED = "model = DDP(net)\nopt = torch.optim.SGD(model.parameters(), lr=0.01)\n"
END = "dist.barrier()\ndist.destroy_process_group()\n"


def look(server: Server, script: Write, text: str, ranks: int = 2) -> dict[str, Any]:
    """The report of a script that runs to its end, with `found`: its codes and evidence."""
    outcome = server.run(script(START + text + END, ranks=ranks), doctor=True)
    assert outcome.codes == [0] * ranks, outcome.errors
    assert outcome.report is not None
    assert outcome.report["notes"] == [], outcome.report["notes"]
    found = {each["code"]: each["evidence"] for each in outcome.report["findings"]}
    return outcome.report | {"found": found}


ACCUMULATE = (
    WRAPPED
    + """
for step in range(12):
    FIRST
    last = step % 3 == 2
    with nullcontext() if last else model.no_sync():
        (loss_of(model, batch()) / 3).backward()
    if last:
        opt.step()
        LAST
"""
)


@pytest.mark.parametrize(
    ("first", "last", "code"),
    [
        ("pass", "opt.zero_grad()", None),
        ("opt.zero_grad()", "pass", "micro_batches_discarded"),
        ("pass", "pass", "gradients_not_cleared"),
    ],
)
def test_gradients_are_cleared_once_per_step_or_the_report_says_so(
    server: Server, script: Write, first: str, last: str, code: str | None
) -> None:
    seen = look(server, script, ACCUMULATE.replace("FIRST", first).replace("LAST", last))
    assert set(seen["found"]) == ({code} if code else set())
    assert seen["equation"]["right"] == (code is None)


def test_gradients_that_a_script_clears_itself_or_keeps_on_purpose_are_no_mistake(
    server: Server, script: Write
) -> None:
    decay = "[p.grad.mul_(0.5) for p in model.parameters()]"
    for last in (decay, "[setattr(p, 'grad', None) for p in model.parameters()]"):
        seen = look(server, script, ACCUMULATE.replace("FIRST", "pass").replace("LAST", last))
        assert seen["found"] == {}


def test_two_losses_from_one_helper_and_an_ascent_on_the_same_batch_are_meant(
    server: Server, script: Write
) -> None:
    text = (
        WRAPPED
        + """
def part(x, label):
    target = torch.full((len(x), 2), label)
    nn.functional.mse_loss(model(x), target).backward()
for step in range(4):
    opt.zero_grad()
    part(batch(3), 1.0)
    part(batch(5), 0.0)
    opt.step()
"""
    )
    assert look(server, script, text)["found"] == {}
    text = (
        WRAPPED
        + """
for step in range(4):
    x = batch()
    for ascend in (True, False):
        opt.zero_grad()
        loss_of(model, x).backward()
        for p in model.parameters() if ascend else ():
            p.data.add_(0.01 * p.grad)
    opt.step()
"""
    )
    assert look(server, script, text)["found"] == {}


@pytest.mark.parametrize(
    ("divide", "clipped"), [("p.grad /= world", False), ("p.grad /= world", True), ("pass", True)]
)
def test_gradients_that_are_unscaled_before_they_are_summed_are_measured_afterward(
    server: Server, script: Write, divide: str, clipped: bool
) -> None:
    clip = "nn.utils.clip_grad_norm_(net.parameters(), 0.1)" if clipped else ""
    text = f"""
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(4):
    opt.zero_grad()
    scaler.scale(loss_of(net, batch())).backward()
    scaler.unscale_(opt)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        {divide}
    {clip}
    scaler.step(opt)
    scaler.update()
"""
    seen = look(server, script, text)
    summed = divide == "pass"
    assert seen["equation"]["combination"] == ("summed" if summed else "averaged")
    assert set(seen["found"]) == ({"own_reduction_sums"} if summed else set())


def test_a_clip_over_the_parameters_of_two_optimizers_is_no_factor_of_either(
    server: Server, script: Write
) -> None:
    text = """
model = DDP(net)
one = torch.optim.SGD(net[0].parameters(), lr=0.01)
two = torch.optim.SGD(net[2].parameters(), lr=0.01)
for step in range(5):
    model.zero_grad()
    loss_of(model, batch()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    one.step()
    two.step()
"""
    for given in ("model.parameters()", "list(model.parameters())"):
        seen = look(server, script, text.replace("model.parameters(), 0.05", f"{given}, 0.05"))
        assert seen["equation"]["right"], seen["equation"]["lines"]
        assert seen["found"] == {}


CLIP = "nn.utils.clip_grad_norm_(list(model.parameters()), 1e-3)"


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("pass", CLIP, "clipped_per_micro_batch"),
        ("dist.all_reduce(loss)", "pass", "loss_reduced_before_backward"),
    ],
)
def test_an_optimizer_that_never_steps_hides_nothing_in_later_steps(
    server: Server, script: Write, before: str, after: str, code: str
) -> None:
    """It counts the backwards of all steps, and a step's own are fewer."""
    text = (
        WRAPPED
        + """
idle = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
for step in range(10):
    loss = loss_of(model, batch()) / 2
    if step > 3 and step % 2 == 0:
        BEFORE
    loss.backward()
    if step > 3 and step % 2 == 0:
        AFTER
    if step % 2:
        opt.step()
        opt.zero_grad()
"""
    )
    seen = look(server, script, text.replace("BEFORE", before).replace("AFTER", after))
    assert code in seen["found"]


def test_replicas_of_two_groups_are_not_compared(server: Server, script: Write) -> None:
    text = """
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
torch.manual_seed(rank // 2)
model = DDP(nn.Linear(4, 2), process_group=groups[rank // 2])
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    opt.zero_grad()
    loss_of(model, batch()).backward()
    opt.step()
"""
    seen = look(server, script, text, ranks=4)
    assert seen["found"] == {}
    assert seen["equation"]["combination"] == "in groups"


def test_ranks_that_split_a_layer_may_see_the_same_data_and_shards_of_a_whole_model_may_not(
    server: Server, script: Write
) -> None:
    text = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
gen = torch.Generator().manual_seed(0)
mesh = init_device_mesh("cpu", (world,))
SPLIT
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(4):
    opt.zero_grad()
    loss_of(net, batch()).backward()
    opt.step()
"""
    split = 'parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})'
    assert look(server, script, text.replace("SPLIT", split))["found"] == {}
    shards = look(server, script, text.replace("SPLIT", "fully_shard(net, mesh=mesh)"))
    assert "same_data_on_ranks" in shards["found"]


def test_batches_in_a_class_of_ones_own_are_looked_into(server: Server, script: Write) -> None:
    """Targets and positions are 0, 1, … on every rank: the object tells whether the data differ."""
    text = """
@dataclass
class Pairs:
    size: int
    views: dict
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, pairs, positions):
        one, two = (self.net(each) for each in pairs.views.values())
        return one @ two.T
model = DDP(Towers())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
gen.manual_seed(SEED)
for step in range(4):
    opt.zero_grad()
    scores = model(Pairs(3, {"one": batch(), "two": batch()}), torch.arange(3))
    nn.functional.cross_entropy(scores, torch.arange(3)).backward()
    opt.step()
"""
    code = "same_data_on_ranks"
    assert code not in look(server, script, text.replace("SEED", "rank"))["found"]
    assert code in look(server, script, text.replace("SEED", "0"))["found"]


LOADING = (
    WRAPPED
    + """
data = TensorDataset(torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(3)))
torch.manual_seed(SEED)
loader = DataLoader(data, batch_size=BATCH, shuffle=True)
for x, in loader:
    x = x[SLICE]
    opt.zero_grad()
    loss_of(model, x).backward()
    opt.step()
"""
)


def loading(count: int, size: int, seed: str, part: str) -> str:
    text = LOADING.replace("COUNT", str(count)).replace("BATCH", str(size))
    return text.replace("SEED", seed).replace("SLICE", part)


def test_each_rank_may_slice_what_all_read_but_not_train_on_all_of_it(
    server: Server, script: Write
) -> None:
    sliced = look(server, script, loading(96, 8, "0", "rank::world"))
    assert sliced["found"] == {}
    whole = look(server, script, loading(96, 8, "rank", ":"))
    assert "Every rank reads all 96 samples" in whole["found"]["same_data_on_ranks"]


def test_a_missing_sampler_is_found_before_the_first_epoch_is_over(
    server: Server, script: Write
) -> None:
    text = loading(40_000, 64, "rank", ":").replace("in loader", "in list(zip(range(64), loader))")
    whole = look(server, script, text.replace("for x,", "for _, (x,)"))
    assert "split the 40000 samples" in whole["found"]["same_data_on_ranks"]


def test_a_new_sampler_in_every_epoch_is_not_taken_for_the_last_one(
    server: Server, script: Write
) -> None:
    text = (
        WRAPPED
        + """
data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(3)))
def train(sampler):
    for x, in DataLoader(data, batch_size=4, sampler=sampler):
        opt.zero_grad()
        loss_of(model, x).backward()
        opt.step()
KEPT = DistributedSampler(data)
order = torch.Generator().manual_seed(5)
for epoch in range(3):
    train(CHOSEN)
"""
    )
    new = text.replace("CHOSEN", "DistributedSampler(data, seed=epoch)")
    assert look(server, script, new)["found"] == {}
    shuffled = "DistributedSampler(Subset(data, torch.randperm(24, generator=order)))"
    same_seed = text.replace("CHOSEN", shuffled)
    same_seed = same_seed.replace("DataLoader(data,", "DataLoader(sampler.dataset,")
    assert look(server, script, same_seed)["found"] == {}
    assert "epoch_order_repeats" in look(server, script, text.replace("CHOSEN", "KEPT"))["found"]


def test_a_scheduler_may_step_per_micro_batch_but_not_per_rank(
    server: Server, script: Write
) -> None:
    text = (
        WRAPPED
        + """
schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=12)
for step in range(24):
    with nullcontext() if step % 2 else model.no_sync():
        (loss_of(model, batch()) / 2).backward()
    EACH
    if step % 2:
        opt.step()
        opt.zero_grad()
        STEP
"""
    )
    code = "scheduler_steps_per_rank"
    each = text.replace("EACH", "schedule.step()").replace("STEP", "pass")
    assert code not in look(server, script, each)["found"]
    both = text.replace("EACH", "pass").replace("STEP", "schedule.step(); schedule.step()")
    assert code in look(server, script, both)["found"]
    long = both.replace("total_iters=12", "total_iters=300").replace("range(24)", "range(600)")
    assert code in look(server, script, long)["found"]


@pytest.mark.parametrize(
    ("rows", "factor", "reduced"), [("1 << 20", 1, False), ("64", 0, False), ("64", 1, True)]
)
def test_gradients_that_cannot_be_read_or_are_zero_are_not_left_over(
    server: Server, script: Write, rows: str, factor: int, reduced: bool
) -> None:
    """A sparse gradient that zero_grad has set to zero is neither None nor dense."""
    text = """
model = nn.Embedding(ROWS, 16, sparse=True)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    opt.zero_grad(set_to_none=False)
    ids = torch.randint(0, 64, (4,), generator=gen)
    (FACTOR * model(ids)).square().mean().backward()
    if REDUCED:
        dist.all_reduce(model.weight.grad)
        model.weight.grad /= world
    opt.step()
"""
    for name, value in (("ROWS", rows), ("FACTOR", factor), ("REDUCED", reduced)):
        text = text.replace(name, str(value))
    assert "gradients_not_cleared" not in look(server, script, text)["found"]


CLIPPED = (
    WRAPPED
    + """
scaler = torch.amp.GradScaler("cpu", init_scale=float(world))
for step in range(4):
    opt.zero_grad()
    scaler.scale(loss_of(model, batch())).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for p in model.parameters():
        SHARE
    scaler.step(opt)
    scaler.update()
"""
)


@pytest.mark.parametrize(
    "share",
    [
        "dist.all_gather([torch.empty_like(p) for _ in range(world)], p.grad)",
        "dist.broadcast(p.grad, 0)",
    ],
)
def test_gradients_that_are_shared_for_a_log_are_those_of_the_wrapper(
    server: Server, script: Write, share: str
) -> None:
    seen = look(server, script, CLIPPED.replace("SHARE", share))
    assert seen["equation"]["right"], seen["equation"]["lines"]
    assert seen["found"] == {}


def test_gradients_that_a_script_reduces_after_many_other_collectives_are_measured_afterward(
    server: Server, script: Write
) -> None:
    text = """
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(3):
    opt.zero_grad()
    scaler.scale(loss_of(net, batch())).backward()
    scaler.unscale_(opt)
    for _ in range(310):
        dist.all_reduce(torch.ones(1))
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    scaler.step(opt)
    scaler.update()
"""
    assert look(server, script, text)["equation"]["combination"] == "averaged"


BATCHES_OF_STRINGS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, batch):
        return self.net(torch.tensor([[float(ord(c)) for c in each] for each in batch.texts]))
@dataclass
class Batch:
    texts: list
    mask: torch.Tensor
model = DDP(Model())
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(4):
    opt.zero_grad()
    one = Batch([f"{SEED:02d}{step:02d}", "abcd"], torch.ones(2))
    model(one).square().mean().backward()
    opt.step()
"""


def test_a_constant_tensor_in_a_batch_does_not_make_the_data_of_the_ranks_equal(
    server: Server, script: Write
) -> None:
    code = "same_data_on_ranks"
    seen = look(server, script, BATCHES_OF_STRINGS.replace("SEED", "rank"))
    assert code not in seen["found"]
    assert code in look(server, script, BATCHES_OF_STRINGS.replace("SEED", "0"))["found"]


STEPPING_HOOK = """
whole = torch.optim.SGD(net.parameters(), lr=0.01) if SHARED else None
for each in net.parameters():
    each.stepper = whole or torch.optim.SGD([each], lr=0.01)
def reduce(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= world
def update(parameter):
    FIRST
    parameter.stepper.step()
    LAST
    parameter.grad = None
for each in list(net.parameters())[:1] if SHARED else net.parameters():
    each.register_post_accumulate_grad_hook(update)
for step in range(8):
    loss_of(net, batch()).backward()
"""


@pytest.mark.parametrize(
    ("first", "last", "wrong"),
    [("reduce(parameter)", "pass", False), ("pass", "reduce(parameter)", True)],
)
def test_an_optimizer_may_step_in_a_hook_that_has_reduced_the_gradient(
    first, last, wrong, server: Server, script: Write
) -> None:
    text = STEPPING_HOOK.replace("FIRST", first).replace("LAST", last).replace("SHARED", "False")
    assert ("optimizer_in_backward" in look(server, script, text)["found"]) == wrong


@pytest.mark.parametrize(("reduced", "wrong"), [("[parameter]", True), ("net.parameters()", False)])
def test_a_hook_that_steps_for_all_parameters_has_to_reduce_all_gradients(
    reduced, wrong, server: Server, script: Write
) -> None:
    text = STEPPING_HOOK.replace("LAST", "whole.zero_grad()").replace("SHARED", "True")
    text = text.replace("FIRST", f"[reduce(each) for each in {reduced} if each.grad is not None]")
    assert ("optimizer_in_backward" in look(server, script, text)["found"]) == wrong


POINT_TO_POINT = (
    WRAPPED
    + """
for step in range(3):
    received = torch.empty(4)
    ops = [dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % world)]
    ops += [dist.P2POp(dist.irecv, received, (rank - 1) % world)]
    for one in dist.batch_isend_irecv(ops):
        one.wait()
    loss_of(model, batch()).backward()
    opt.step()
    opt.zero_grad()
"""
)


def test_batched_sends_and_receives_run_as_without_the_doctor(
    server: Server, script: Write
) -> None:
    seen = look(server, script, POINT_TO_POINT)
    assert seen["equation"]["right"], seen["equation"]["lines"]
    assert seen["found"] == {}


SCRIPTED = (
    WRAPPED
    + """
@torch.jit.script
def overlap(x: torch.Tensor, y: torch.Tensor):
    return 1 - 2 * torch.sum(x * y) / torch.sum(x + y)
def loss(x: torch.Tensor, y: torch.Tensor):
    return nn.functional.binary_cross_entropy_with_logits(x, y)
scripted, dropout = torch.jit.script(loss), torch.jit.script(nn.Dropout(0.1))
for step in range(3):
    x = batch()
    out = dropout(model(x))
    value = scripted(out, torch.sigmoid(x[:, :2])) + overlap(torch.sigmoid(out), out.detach() ** 2)
    value.backward()
    opt.step()
    opt.zero_grad()
"""
)


def test_torchscript_compiles_what_the_doctor_observes(server: Server, script: Write) -> None:
    assert "wrapper_lost" not in look(server, script, SCRIPTED)["found"]


OWN_SHARDS = """
class Sharded(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            own = torch.empty(p.numel() // world)
            dist.reduce_scatter_single(own, p.grad.flatten())
            mine = p.view(-1).chunk(world)[rank] - 0.1 * own / world
            dist.all_gather_single(p.view(-1), mine)
opt = Sharded(net.parameters())
for step in range(3):
    loss_of(net, batch()).backward()
    opt.step()
    opt.zero_grad()
"""


def test_an_optimizer_that_shards_by_the_newest_collectives_is_no_lost_wrapper(
    server: Server, script: Write
) -> None:
    assert look(server, script, OWN_SHARDS)["found"] == {}


TWO_ON_SHARDS = """
from torch.distributed.fsdp import fully_shard
fully_shard(net)
first = torch.optim.SGD([p for p in net.parameters() if p.ndim == 2], lr=0.1)
second = torch.optim.AdamW([p for p in net.parameters() if p.ndim != 2], lr=0.01)
for step in range(4):
    loss_of(net, batch()).backward()
    first.step()
    second.step()
    first.zero_grad()
    second.zero_grad()
"""


def test_two_optimizers_on_sharded_parameters_clip_nothing(server: Server, script: Write) -> None:
    assert look(server, script, TWO_ON_SHARDS)["found"] == {}


SOMETIMES_NO_LABELS = (
    WRAPPED
    + """
for step in range(6):
    opt.zero_grad()
    if step NONE:
        loss_of(model, batch()).backward()
    opt.step()
"""
)


@pytest.mark.parametrize(("none", "wrong"), [("!= 3", False), ("> 9", True)])
def test_one_step_without_a_backward_is_no_wrong_optimizer(
    none, wrong, server: Server, script: Write
) -> None:
    seen = look(server, script, SOMETIMES_NO_LABELS.replace("NONE", none))
    assert ("optimizer_on_other_parameters" in seen["found"]) == wrong


SKIPPED_FIRST = """
torch.manual_seed(rank)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(4):
    opt.zero_grad()
    loss = loss_of(net, batch())
    scaler.scale(loss * (float("inf") if step == 0 else 1.0)).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    scaler.step(opt)
    scaler.update()
"""


def test_replicas_are_compared_if_the_first_step_was_skipped(server: Server, script: Write) -> None:
    assert "replicas_differ_at_start" in look(server, script, SKIPPED_FIRST)["found"]


SUMMED_FOR_THE_LOG = (
    WRAPPED
    + """
total = 0.0
for step in range(4):
    x = batch()
    mask = (torch.arange(3) < 2).float()
    each = nn.functional.mse_loss(model(x), x[:, :2], reduction="none").mean(1) * mask
    (each.sum() / mask.sum()).backward()
    total += each.sum().item()
    opt.step()
    opt.zero_grad()
"""
)


def test_a_sum_for_the_log_after_backward_ends_no_observation(
    server: Server, script: Write
) -> None:
    assert look(server, script, SUMMED_FOR_THE_LOG)["equation"]["right"]


STARTS_A_PROBE = (
    """
import os, subprocess, sys, tempfile
probe = "import torch; w = torch.nn.Parameter(torch.ones(2)); o = torch.optim.SGD([w], lr=1.0)"
probe += "; w.sum().backward(); o.step(); print('probed')"
"""
    + WRAPPED
    + """
for step in range(4):
    if step == 2 and rank == 0:
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
        assert done.stdout == "probed\\n", done.stderr
    loss_of(model, batch()).backward()
    opt.step()
    opt.zero_grad()
"""
)


def test_a_process_that_a_rank_starts_is_not_taken_for_the_rank(
    server: Server, script: Write
) -> None:
    seen = look(server, script, STARTS_A_PROBE)
    assert seen["equation"]["right"], seen["equation"]["lines"]


MANY_MICRO_BATCHES = (
    WRAPPED
    + """
for step in range(2):
    for micro in range(96):
        with nullcontext() if micro == 95 else model.no_sync():
            (loss_of(model, batch()) / 96).backward()
    opt.step()
    opt.zero_grad()
"""
)


def test_a_step_of_many_micro_batches_is_counted_whole(server: Server, script: Write) -> None:
    seen = look(server, script, MANY_MICRO_BATCHES)
    assert seen["equation"]["micro_batches"] == 96
    assert seen["equation"]["right"], seen["equation"]["lines"]


MODELS_ONE_AFTER_ANOTHER = """
import gc, weakref
alive = []
for fold in range(4):
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        loss_of(model, batch()).backward()
        opt.step()
        opt.zero_grad()
    alive += [weakref.ref(each) for each in model.parameters()]
    del model, opt
    gc.collect()
assert not any(each() is not None for each in alive), "parameters are kept alive"
"""


def test_models_that_are_gone_leave_no_memory_behind(server: Server, script: Write) -> None:
    seen = look(server, script, MODELS_ONE_AFTER_ANOTHER)
    assert seen["equation"]["right"], seen["equation"]["lines"]
    assert seen["found"] == {}


LOGGED_LOSS = (
    WRAPPED
    + """
total = 0.0
for step in range(4):
    for micro in range(2):
        with nullcontext() if micro else model.no_sync():
            loss = loss_of(model, batch()) / 2
            BEFORE
            loss.backward()
            AFTER
    opt.step()
    opt.zero_grad()
"""
)


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ("pass", "dist.all_reduce(loss); total += loss.item() / world", False),
        ("log = loss.clone(); dist.all_reduce(log); log /= world", "pass", False),
        ("dist.all_reduce(loss); loss = loss / world", "pass", True),
    ],
)
def test_only_a_loss_that_backward_needs_must_not_be_reduced_before(
    before, after, wrong, server: Server, script: Write
) -> None:
    text = LOGGED_LOSS.replace("BEFORE", before).replace("AFTER", after)
    assert ("loss_reduced_before_backward" in look(server, script, text)["found"]) == wrong


CONTRASTIVE = """
class Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_gather([torch.empty(4) for _ in range(world)], x.mean(0))
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient
class Normed(nn.Module):
    def forward(self, x):
        return Statistics.apply(x) if SYNCED else x
net = nn.Sequential(nn.Linear(4, 4), Normed())
net.scale = nn.Parameter(torch.tensor(1.0))
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def gathered(x):
    pieces = [torch.zeros_like(x) for _ in range(world)]
    dist.all_gather(pieces, x.detach())
    pieces[rank] = x
    return torch.cat(pieces)
for step in range(3):
    x = batch(6)
    features = model(torch.cat([x, x + 0.1 * torch.randn(6, 4, generator=gen)]))
    left, right = features.chunk(2)
    everyone = gathered(right)
    if WHOLE:
        scores, targets = net.scale * gathered(left) @ everyone.T, torch.arange(6 * world)
    else:
        scores, targets = net.scale * left @ everyone.T, torch.arange(6) + 6 * rank
    nn.functional.cross_entropy(scores, targets).backward()
    opt.step()
    opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("synced", "whole", "says"),
    [
        (False, False, "no factor repairs it"),
        (True, False, "no factor repairs it"),
        (False, True, "1/2 of one process's gradient for what comes before the gather"),
    ],
)
def test_a_gather_without_gradient_is_told_by_what_each_rank_compares(
    synced, whole, says, server: Server, script: Write
) -> None:
    text = CONTRASTIVE.replace("SYNCED", str(synced)).replace("WHOLE", str(whole))
    assert says in look(server, script, text)["found"]["gather_without_gradient"]


DIVIDED_AFTERWARD = (
    WRAPPED
    + """
for step in range(4):
    x = batch(3 + step + rank)
    out = model(x)
    nn.functional.mse_loss(out, x[:, :2], reduction="sum").backward()
    n = torch.tensor(out.numel())
    dist.all_reduce(n)
    for p in model.parameters():
        p.grad.mul_(FACTOR / n)
    opt.step()
    opt.zero_grad()
"""
)


@pytest.mark.parametrize(("factor", "right"), [("world", True), ("1", False)])
def test_gradients_that_are_divided_by_a_count_after_backward_are_not_clipped(
    factor, right, server: Server, script: Write
) -> None:
    seen = look(server, script, DIVIDED_AFTERWARD.replace("FACTOR", factor))
    assert seen["equation"]["right"] == right, seen["equation"]["lines"]
    assert seen["found"].keys() == (set() if right else {"missing_world_size_factor"})


HALF_PRECISION = """
model = DDP(net.to(torch.bfloat16))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    loss_of(model, 30 * batch().to(torch.bfloat16)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
"""


def test_a_clip_in_half_precision_is_no_part_of_the_combination(
    server: Server, script: Write
) -> None:
    seen = look(server, script, HALF_PRECISION)
    assert seen["equation"]["right"], seen["equation"]["lines"]


OWN_FLAT_SHARDS = """
model = DDP(net)
flat = torch.cat([p.detach().flatten() for p in net.parameters()])
flat = torch.cat([flat, torch.zeros(-len(flat) % world)])
shard = nn.Parameter(flat.chunk(world)[rank].clone())
opt = torch.optim.SGD([shard], lr=0.01)
for step in range(3):
    model.zero_grad()
    loss_of(model, batch()).backward()
    gradients = torch.cat([p.grad.flatten() for p in net.parameters()])
    gradients = torch.cat([gradients, torch.zeros(-len(gradients) % world)])
    shard.grad = gradients.chunk(world)[rank].clone()
    opt.step()
    pieces = [torch.empty_like(shard) for _ in range(world)]
    dist.all_gather(pieces, shard.detach())
    whole = torch.cat(pieces)[: sum(p.numel() for p in net.parameters())]
    nn.utils.vector_to_parameters(whole, net.parameters())
"""


def test_an_optimizer_of_flat_shards_has_replicas_that_differ_on_purpose(
    server: Server, script: Write
) -> None:
    assert look(server, script, OWN_FLAT_SHARDS)["found"] == {}


SUMMED_SHARDS = """
from torch.distributed.fsdp import fully_shard
fully_shard(net)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(4):
    x = batch(3 + rank)
    nn.functional.mse_loss(net(x), x[:, :2], reduction="sum").backward()
    n = torch.tensor(2 * len(x))
    dist.all_reduce(n)
    for p in net.parameters():
        p.grad.mul_(world / n.item())
    opt.step()
    opt.zero_grad()
"""


def test_what_could_not_be_measured_is_said_to_be_assumed(server: Server, script: Write) -> None:
    seen = look(server, script, SUMMED_SHARDS)
    [found] = seen["findings"]
    assert (found["code"], found["severity"]) == ("missing_world_size_factor", "note")
    assert "could not be measured" in found["evidence"]


RAW_TENSOR = (
    WRAPPED
    + """
alpha = torch.zeros(1, requires_grad=True)
alone = torch.optim.SGD([alpha], lr=0.5)
for step in range(4):
    x = batch()
    loss = loss_of(model, x) + (alpha * x.mean()).sum()
    opt.zero_grad()
    alone.zero_grad()
    loss.backward()
    opt.step()
    alone.step()
    with torch.no_grad():
        net[0].weight.add_(0.1 * rank)
"""
)


def test_an_optimizer_of_a_raw_tensor_does_not_hide_that_replicas_drift(
    server: Server, script: Write
) -> None:
    assert "replicas_drift" in look(server, script, RAW_TENSOR)["found"]
