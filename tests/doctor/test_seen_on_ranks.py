"""Real ranks: what the observers write down is what the rules need."""

from collections.abc import Callable
from typing import Any

import pytest
from doctor.harness.runs import Server
from doctor.harness.scripts import Script

Write = Callable[..., Script]

START = """
from contextlib import nullcontext
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
def train(model, opt, steps):
    for step in range(steps):
        opt.zero_grad()
        loss_of(model, batch()).backward()
        opt.step()
def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
"""
WRAPPED = "model = DDP(net)\nopt = torch.optim.SGD(model.parameters(), lr=0.01)\n"
END = "dist.barrier()\ndist.destroy_process_group()\n"


def look(server: Server, script: Write, text: str, ranks: int = 2) -> dict[str, Any]:
    """The report of a script that runs to its end, with `found`: its codes and evidence."""
    one = script(START + text + END, ranks=ranks)
    # On a busy machine, ranks may be slow without being stuck.
    outcome = server.run(one, doctor=True, options=("--hang-after", "0"))
    assert outcome.codes == [0] * ranks, outcome.errors
    assert outcome.report is not None
    assert outcome.report["notes"] == [], outcome.report["notes"]
    found = {finding["code"]: finding["evidence"] for finding in outcome.report["findings"]}
    return outcome.report | {"found": found}


# The optimizer gets a multiple of what the ranks computed, and nothing is found.
RIGHT = {
    "a clip in half precision over two optimizers is no factor of either": """
model = DDP(net.to(torch.bfloat16))
one = torch.optim.SGD(net[0].parameters(), lr=0.01)
two = torch.optim.SGD(net[2].parameters(), lr=0.01)
for step in range(5):
    model.zero_grad()
    loss_of(model, 30 * batch().to(torch.bfloat16)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    one.step()
    two.step()
""",
    "gradients that are shared for a log are those of the wrapper": WRAPPED
    + """
scaler = torch.amp.GradScaler("cpu", init_scale=float(world))
for step in range(4):
    opt.zero_grad()
    scaler.scale(loss_of(model, batch())).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for p in model.parameters():
        dist.broadcast(p.grad, 0)
    scaler.step(opt)
    scaler.update()
""",
    "what a step does besides, for a log or in torchscript, ends no observation": WRAPPED
    + """
with torch.device("meta"):
    shape = nn.Linear(4, 2)
nn.functional.cross_entropy(shape(torch.randn(3, 4, device="meta")),
                            torch.zeros(3, dtype=torch.long, device="meta"))
@torch.jit.script
def overlap(x: torch.Tensor, y: torch.Tensor):
    return 1 - 2 * torch.sum(x * y) / torch.sum(x + y)
def loss(x: torch.Tensor, y: torch.Tensor):
    return nn.functional.binary_cross_entropy_with_logits(x, y)
scripted, dropout = torch.jit.script(loss), torch.jit.script(nn.Dropout(0.1))
total, mask = 0.0, (torch.arange(3) < 2).float()
for step in range(4):
    received = torch.empty(4)
    ops = [dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % world)]
    ops += [dist.P2POp(dist.irecv, received, (rank - 1) % world)]
    for one in dist.batch_isend_irecv(ops):
        one.wait()
    x = batch()
    out = dropout(model(x))
    each = nn.functional.mse_loss(out, x[:, :2], reduction="none").mean(1) * mask
    value = scripted(out, torch.sigmoid(x[:, :2])) + overlap(torch.sigmoid(out), out.detach() ** 2)
    (each.sum() / mask.sum() + value).backward()
    total += each.sum().item()
    opt.step()
    opt.zero_grad()
""",
    "models that are gone leave no memory behind": """
import gc, weakref
alive = []
for fold in range(4):
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, opt, 2)
    alive += [weakref.ref(each) for each in model.parameters()]
    del model, opt
    gc.collect()
assert not any(each() is not None for each in alive), "parameters are kept alive"
""",
    "gradients divided by a count after backward are not clipped": WRAPPED
    + """
for step in range(4):
    x = batch(3 + step + rank)
    out = model(x)
    nn.functional.mse_loss(out, x[:, :2], reduction="sum").backward()
    n = torch.tensor(out.numel())
    dist.all_reduce(n)
    for p in model.parameters():
        p.grad.mul_(world / n)
    opt.step()
    opt.zero_grad()
""",
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_right_step_is_seen_as_right(server: Server, script: Write, text: str) -> None:
    seen = look(server, script, text)
    assert seen["measured"]["gradients"]["combination"] in ("averaged", "scaled"), seen["measured"]
    assert seen["found"] == {}


# There is nothing to report; what a step computes is not always measured.
INTENDED = {
    "replicas may differ for many steps before they are averaged": """
opt = torch.optim.SGD(net.parameters(), lr=0.01)
anchors = [p.detach().clone() for p in net.parameters()]
for step in range(1, 25):
    loss_of(net, batch()).backward()
    opt.step()
    opt.zero_grad()
    if step % 20 == 0:
        for anchor, p in zip(anchors, net.parameters()):
            change = anchor - p.detach()
            dist.all_reduce(change)
            anchor -= change / world
            p.data.copy_(anchor)
""",
    "a loss that is NaN on every rank is no equal data": """
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    opt.zero_grad()
    (net(batch()).square().mean() / 0 * 0).backward()
    average(net)
    opt.step()
""",
    "an optimizer that shards by the newest collectives needs no wrapper": """
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
train(net, opt, 3)
""",
    "halves of a step that are reduced and added up by the script": """
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    kept = []
    for half in range(2):
        (loss_of(net, batch()) / 2).backward()
        average(net)
        kept.append([p.grad for p in net.parameters()])
        for p in net.parameters():
            p.grad = None
    for p, one, other in zip(net.parameters(), *kept):
        p.grad = one + other
    opt.step()
    opt.zero_grad()
""",
    "two optimizers on sharded parameters clip nothing": """
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
""",
    "an optimizer of flat shards has replicas that differ on purpose": """
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
""",
    "a new sampler in every epoch is not taken for the last one": WRAPPED
    + """
data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(3)))
def train(sampler):
    for x, in DataLoader(data, batch_size=4, sampler=sampler):
        opt.zero_grad()
        loss_of(model, x).backward()
        opt.step()
for epoch in range(3):
    train(DistributedSampler(data, seed=epoch))
""",
    "an optimizer may step in a hook that has reduced the gradient": """
for each in net.parameters():
    each.stepper = torch.optim.SGD([each], lr=0.01)
def reduce(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= world
def update(parameter):
    reduce(parameter)
    parameter.stepper.step()
    parameter.grad = None
for each in net.parameters():
    each.register_post_accumulate_grad_hook(update)
for step in range(8):
    loss_of(net, batch()).backward()
""",
    "an output that the loss does not use ends no observation": """
class Both(nn.Module):
    def forward(self, x):
        out = net(x)
        return nn.functional.mse_loss(out, x[:, :2]), nn.functional.l1_loss(out, x[:, :2])
both = Both()
both.net = net
model = DDP(both, find_unused_parameters=True)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    opt.zero_grad()
    model(batch())[0].backward()
    opt.step()
""",
}


@pytest.mark.parametrize("text", INTENDED.values(), ids=INTENDED)
def test_what_looks_like_a_mistake_and_is_meant_is_not_reported(
    server: Server, script: Write, text: str
) -> None:
    assert look(server, script, text)["found"] == {}


# By code and what could hide it.
WRONG = {
    ("replicas_differ_at_start", "the first step was skipped"): """
torch.manual_seed(rank)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(4):
    opt.zero_grad()
    loss = loss_of(net, batch())
    scaler.scale(loss * (float("inf") if step == 0 else 1.0)).backward()
    average(net)
    scaler.step(opt)
    scaler.update()
""",
    ("replicas_drift", "there is an optimizer of a raw tensor"): WRAPPED
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
""",
    ("model_changed_after_wrapping", "a layer is unfrozen after the first steps"): """
net[0].requires_grad_(False)
model = DDP(net)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(16):
    net[0].requires_grad_(step >= 10)
    opt.zero_grad()
    loss_of(model, batch()).backward()
    opt.step()
""",
    ("hyperparameters_differ", "they do so after the first steps"): WRAPPED
    + """
for step in range(14):
    if step == 10 and rank == 0:
        opt.param_groups[0]["lr"] = 0.02
    opt.zero_grad()
    loss_of(model, batch()).backward()
    opt.step()
""",
    ("replicas_drift", "the script compares copies of the parameters itself"): """
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(4):
    for micro in range(2):
        (loss_of(net, batch()) / 2).backward()
        for p in net.parameters() if micro else ():
            dist.all_reduce(p.grad.clone())
    opt.step()
    opt.zero_grad()
flat = torch.cat([p.detach().flatten() for p in net.parameters()])
dist.all_reduce(flat)
""",
    ("replicas_drift", "only another model has a wrapper"): WRAPPED
    + """
made = nn.Linear(4, 4)
two = torch.optim.SGD(made.parameters(), lr=0.01)
for step in range(4):
    x = batch()
    opt.zero_grad()
    loss_of(model, made(x).detach()).backward()
    opt.step()
    two.zero_grad()
    loss_of(model, made(x)).backward()
    two.step()
""",
    ("replicas_differ_at_start", "it is a second model, loaded on rank 0 only"): WRAPPED
    + """
train(model, opt, 8)
model = DDP(nn.Linear(4, 2))
if rank == 0:
    model.module.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
opt = torch.optim.SGD(model.parameters(), lr=0.01)
train(model, opt, 4)
""",
    ("scaled_by_world_size", "the factor is on each sample's loss"): WRAPPED
    + """
for step in range(3):
    x = batch()
    each = nn.functional.mse_loss(model(x), x[:, :2], reduction="none").mean(1)
    opt.zero_grad()
    (each * dist.get_world_size()).mean().backward()
    opt.step()
""",
    ("own_reduction_sums", "gradients are unscaled and clipped"): """
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(4):
    opt.zero_grad()
    scaler.scale(loss_of(net, batch())).backward()
    scaler.unscale_(opt)
    for p in net.parameters():
        dist.all_reduce(p.grad)
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    scaler.step(opt)
    scaler.update()
""",
    ("loss_reduced_before_backward", "another loss is reduced for a log only"): WRAPPED
    + """
for step in range(4):
    opt.zero_grad()
    loss = loss_of(model, batch())
    with torch.no_grad():
        dist.all_reduce(loss_of(net, batch()))
    dist.all_reduce(loss)
    (loss / world).backward()
    opt.step()
""",
}


@pytest.mark.parametrize(("code", "although"), WRONG)
def test_a_fault_is_found_although(server: Server, script: Write, code: str, although: str) -> None:
    assert code in look(server, script, WRONG[code, although])["found"]


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
    ("first", "last", "cleared", "kept"),
    [
        ("opt.zero_grad()", "pass", [2] * 4, []),
        ("pass", "pass", [], [4] * 3),
    ],
)
def test_the_report_says_what_zero_grad_clears_and_leaves(
    server: Server, script: Write, first: str, last: str, cleared: list[int], kept: list[int]
) -> None:
    seen = look(server, script, ACCUMULATE.replace("FIRST", first).replace("LAST", last))
    line = seen["measured"]["backwards"]
    assert (line["cleared"], line["kept"]) == (cleared, kept)


def test_replicas_of_two_groups_are_not_compared(server: Server, script: Write) -> None:
    text = """
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
torch.manual_seed(rank // 2)
model = DDP(nn.Linear(4, 2), process_group=groups[rank // 2])
opt = torch.optim.SGD(model.parameters(), lr=0.01)
train(model, opt, 4)
"""
    seen = look(server, script, text, ranks=4)
    assert seen["found"] == {}
    assert any("parts of a model" in one for one in seen["not_measured"])


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
train(net, opt, 4)
"""
    split = 'parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})'
    assert look(server, script, text.replace("SPLIT", split))["found"] == {}
    shards = "for part in (net[0], net[2], net):\n    fully_shard(part, mesh=mesh)"
    assert set(look(server, script, text.replace("SPLIT", shards))["found"]) == {
        "same_data_on_ranks"
    }


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
    assert seen["measured"]["backwards"]["backwards"] == [96]
    assert seen["found"] == {}


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


def test_a_factor_on_sharded_gradients_is_measured(server: Server, script: Write) -> None:
    assert look(server, script, SUMMED_SHARDS)["found"] == {}
    wrong = look(server, script, SUMMED_SHARDS.replace("world / n", "1 / n"))
    [found] = wrong["findings"]
    assert (found["code"], found["severity"]) == ("missing_world_size_factor", "hint")


REPLICAS_OF_SHARDS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
for part in (net[0], net[2], net):
    fully_shard(part, mesh=mesh)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    for micro in range(3):
        net.FLAG(micro == LAST)
        (loss_of(net, batch()) / 3).backward()
    opt.step()
    opt.zero_grad()
"""


def test_what_the_optimizer_gets_under_fully_shard_is_the_average_of_all_micro_batches(
    server: Server, script: Write
) -> None:
    """Its own flags may leave micro-batches out: of the shards, or of the replicas."""
    for flag in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        text = REPLICAS_OF_SHARDS.replace("FLAG", flag)
        early = look(server, script, text.replace("LAST", "1"), ranks=4)
        assert "other_than_average" in early["found"]
        waits = flag == "set_requires_gradient_sync"
        assert ("last_micro_batch_unsynced" in early["found"]) == waits
    right = look(server, script, text.replace("LAST", "2"), ranks=4)
    assert right["found"] == {}
    assert right["measured"]["gradients"]["combination"] == "averaged"


IN_STEP = """
class Averaging(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.sub_(0.01 * p.grad / world)
opt = Averaging(net.parameters(), lr=0.01)
train(net, opt, 3)
"""


def test_an_optimizer_that_combines_the_ranks_in_its_step_is_not_called_checked(
    server: Server, script: Write
) -> None:
    report = look(server, script, IN_STEP)
    assert "inside of its step" in report["not_measured"][0]
    assert len(report["unchecked"]) == 1


SPLIT_SEQUENCE = """
from torch.distributed._functional_collectives import all_gather_tensor_autograd
class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        own = self.net[:2](x.chunk(world)[rank])
        return self.net[2](all_gather_tensor_autograd(own, 0, dist.group.WORLD))
model = DDP(Split())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
gen.manual_seed(0)
for step in range(3):
    loss_of(model, batch(4)).backward()
    opt.step()
    opt.zero_grad()
"""


def test_ranks_that_split_one_batch_and_gather_its_parts_do_not_train_on_the_same_data(
    server: Server, script: Write
) -> None:
    found = look(server, script, SPLIT_SEQUENCE)["findings"]
    assert {one["severity"] for one in found} <= {"note"}, found
