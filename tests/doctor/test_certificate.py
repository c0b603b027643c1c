"""The certificate: each verdict once, measured on scripts whose truth is known."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_doctor.explain.agreement import contradicted
from doctor.harness.certify import certified
from doctor.harness.runs import QUIET, SOURCES
from doctor.harness.scripts import Script, corpus
from processes import all_gone, processes_with

import ddp_doctor
from ddp_doctor.certificate.fixed import Fixed
from ddp_doctor.certificate.measure import HALF, compare, shares
from ddp_doctor.certificate.plan import AGAIN, COPIES, DEAL, LATER, OWN, Part
from ddp_doctor.certificate.premises import Premises, parted, same_rows
from ddp_doctor.certificate.program import are_mixed_up, exit_code, keep_output
from ddp_doctor.certificate.samples import Handed, Recorded
from ddp_doctor.certificate.starts import Start
from ddp_doctor.certificate.steps import filled
from ddp_doctor.certificate.verdict import judge
from ddp_doctor.facts.certificate import Certificate, Property
from labkit.launch.forks import ForkServer
from labkit.launch.ranks import run_ranks
from prove_it import prove

SCRIPTS = {script.name: script for script in corpus()}
HEAD = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)

def update(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
# A wrapped model and its optimizer; each rank draws its own samples.
START = f"""{HEAD}
model = DDP(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.stop()


def test_a_loader_with_a_mean_is_equal_in_all_properties(forks: ForkServer) -> None:
    certificate = certified(forks, SCRIPTS["mean_loss"])
    assert certificate["verdict"] == "equal"
    assert {one["name"]: one["verdict"] for one in certificate["properties"]} == {
        "P1": "equal",
        "P2": "equal",
        "P3": "equal",
        "later": "equal",
    }
    assert certificate["noise"] < 1e-5


# Scripts of the corpus: what each is found to be, and a part of the reason.
FOUND = {
    "token_means": ("different", "0.318 : 0.682"),
    # Drawn samples, constants, and masks made row by row reach the one process.
    **dict.fromkeys(
        ("gan", "token_sum_times_world", "two_backwards_one_batch", "own_sync_batchnorm"),
        ("equal", ""),
    ),
    "experts_with_zeros": ("not judged", "experts_with_zeros.py:47"),  # only one rank does it
    "clip_gather_cuts_the_graph": ("different", ""),
    "clip_gathered": ("equal", ""),
    "local_sgd": ("different", "local SGD, different by design"),
    "post_local_sgd": ("different", "local SGD, different by design"),
    "clip_then_average": ("different", "clipped before the ranks' gradients are combined"),
    "own_average": ("equal", ""),
    "fsdp2": ("equal", ""),
    "fsdp2_own_clip": ("different", ""),  # each shard by a norm of its own
}


@pytest.mark.parametrize("name", FOUND)
def test_a_script_is_found_to_be_what_it_is_with_the_reason(forks: ForkServer, name: str) -> None:
    certificate = certified(forks, SCRIPTS[name])
    verdict, why = FOUND[name]
    assert certificate["verdict"] == verdict, certificate
    assert why in certificate["why"]


def test_a_lost_factor_is_named_and_measured_and_one_optimizer_per_parameter_is_no_local_sgd(
    forks: ForkServer,
) -> None:
    certificate = certified(forks, SCRIPTS["token_sum_over_global_count"])
    assert certificate["factor"] == "1/W"
    assert certificate["ratio"] == pytest.approx(0.5, abs=1e-3)
    assert "by design" not in certified(forks, SCRIPTS["fused_backward"])["why"]


def test_accumulation_in_one_process_is_judged_by_another_deal(forks: ForkServer) -> None:
    right = certified(forks, SCRIPTS["one_process"])
    means = SCRIPTS["one_process"].text.replace(
        'reduction="sum") / count', "ignore_index=-100) / accumulate"
    )
    wrong = certified(forks, replace(SCRIPTS["one_process"], text=means))
    assert (right["verdict"], wrong["verdict"]) == ("equal", "different")


MICRO_BATCHES = (
    START
    + """
for step in range(5):
    optimizer.zero_grad()
    for _ in range(3):
        x = torch.randn(6, 6)
        loss = cross_entropy(model(x), x.argmax(1) % 4)
        (loss / 3).backward()
    optimizer.step()
"""
)


def test_rules_look_at_the_number_of_micro_batches_which_no_run_measures() -> None:
    right, wrong = prove(MICRO_BATCHES), prove(MICRO_BATCHES.replace("loss / 3", "loss"))
    assert (right.verdict, wrong.verdict) == ("equal", "equal")
    assert "not divided by the accumulation" not in right.text
    assert "not divided by the accumulation" in wrong.text


CONTRASTS = (
    START
    + """
from torch.distributed.nn.functional import all_gather

for step in range(5):
    first, second = model(torch.randn(6, 2, 6)).unbind(1)
    labels = torch.arange(len(first)) + len(first) * dist.get_rank()
    update(cross_entropy(first @ torch.cat(all_gather(second)).T, labels))
"""
)


def test_labels_that_are_positions_among_all_ranks_samples_are_not_dealt(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    right = certified(forks, script(CONTRASTS))
    assert [one["verdict"] for one in right["properties"]] == ["equal"] * 4, right
    wrong = certified(forks, script(CONTRASTS.replace(" + len(first) * dist.get_rank()", "")))
    assert wrong["verdict"] == "different"


def test_ranks_that_seed_nothing_draw_other_samples_though_they_are_forks(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    unseeded = START.replace("torch.manual_seed(dist.get_rank() + 1)\n", "").replace(
        "torch.manual_seed(0)\n", ""
    )
    steps = "for step in range(5):\n    update(model(torch.randn(6, 6)).pow(4).mean())\n"
    found = certified(forks, script(unseeded + steps))
    assert found["verdict"] == "equal"
    assert not any("same samples" in note for note in found["notes"])


TRIPLETS = (
    START
    + """
for step in range(5):
    x = torch.randn(8, 6)
    out = model(x)
    near = (out[::2] - out[1::2]).norm(dim=1)
    far = (out[::2] - out[1::2].roll(1, 0)).norm(dim=1)
    triplets = torch.relu(near - far + 1).mean()
    update((cross_entropy(out, x.argmax(1) % 4) + triplets) * dist.get_world_size())
"""
)


def test_a_loss_over_pairs_times_the_world_size_is_different_and_the_factor_is_named(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    certificate = certified(forks, script(TRIPLETS))
    assert certificate["verdict"] == "different"
    assert "Copies of one batch give W = 2 times" in certificate["why"]
    of = {one["name"]: one for one in certificate["properties"]}
    assert of["P1"]["verdict"] == "different"
    assert of["P3"]["ratio"] == pytest.approx(2, abs=1e-3)


def test_hooks_that_are_lost_after_the_measured_step_are_seen_in_a_later_one(
    forks: ForkServer,
) -> None:
    certificate = certified(forks, SCRIPTS["half_precision_snapshot"])
    of = {one["name"]: one["verdict"] for one in certificate["properties"]}
    assert (of["P1"], of["later"], certificate["verdict"]) == ("equal", "different", "different")
    assert "From optimizer step 3 (counted from 0) on" in certificate["why"]
    equal = Certificate("equal", "", properties=[Property("P1", "equal", "", 1.0, 1.0)])
    assert "model_changed_after_wrapping" not in contradicted(equal)


def test_other_parameters_that_train_later_are_named(forks: ForkServer) -> None:
    certificate = certified(forks, SCRIPTS["unfreeze_and_rewrap"])
    assert certificate["verdict"] == "equal"
    assert "From optimizer step 3 (counted from 0) on, other parameters" in certificate["notes"][-1]


FROM_META = f"""{HEAD}
from torch.distributed.fsdp import fully_shard

with torch.device("meta"):
    model = fully_shard(nn.Linear(8, 4))
model.to_empty(device="cpu")
model.reset_parameters()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(5):
    x = torch.randn(6, 8, generator=generator)
    update(cross_entropy(model(x), x.argmax(1) % 4, reduction="sum"))
"""


def test_a_sharded_model_may_get_its_memory_after_it_was_sharded(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    certificate = certified(forks, script(FROM_META))
    assert (certificate["verdict"], certificate["factor"]) == ("scaled", "1/W"), certificate
    assert not any("same samples" in note for note in certificate["notes"])
    shared = certified(
        forks, script(FROM_META.replace("manual_seed(dist.get_rank())", "manual_seed(0)"))
    )
    assert shared["verdict"] == "equal"
    assert any("same samples" in note for note in shared["notes"])


@pytest.fixture
def lost_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script whose gradient is 1/W of the right one, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, value in (QUIET | {"PYTHONPATH": str(SOURCES)}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(SCRIPTS["token_sum_over_global_count"].text)
    return tmp_path


@pytest.mark.slow
def test_under_torchrun_rank_0_reports_and_the_exit_code_is_the_scripts(
    lost_factor: Path,
) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = ["-m", "ddp_doctor", "--certify", "--json", "certificate.json", "train.py"]
    done = subprocess.run([sys.executable, *launch, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ddp-doctor certificate: SCALED, 2 ranks") == 1
    certificate = json.loads((lost_factor / "certificate.json").read_text())["certificate"]
    assert (certificate["version"], certificate["factor"]) == (1, "1/W")
    found = json.loads((lost_factor / "certificate.json").read_text())["findings"]
    assert "missing_world_size_factor" in {finding["code"] for finding in found}
    assert "SCALED" in (lost_factor / "ddp-doctor" / "report.html").read_text()


@pytest.mark.parametrize(
    ("verdict", "error", "worst", "fail_on", "code"),
    [
        ("different", "", "error", None, 0),
        ("not judged", "", None, None, 0),
        ("not judged", "ValueError", None, None, 1),
        ("different", "", None, "error", 3),
        ("equal", "", "error", "error", 3),
        ("equal", "", "warning", "error", 0),
        ("not judged", "ValueError", None, "warning", 4),
    ],
)
def test_only_fail_on_makes_an_exit_code_of_the_verdict(
    verdict: str, error: str, worst: str | None, fail_on: str | None, code: int
) -> None:
    assert exit_code(Certificate(verdict, "", error=error), worst, fail_on) == code


@pytest.mark.slow
def test_a_test_of_ones_own_can_ask_for_the_certificate(lost_factor: Path) -> None:
    certificate = ddp_doctor.certify("train.py")
    assert (certificate.verdict, certificate.factor, certificate.world) == ("scaled", "1/W", 2)


MARKED = f"""{HEAD}
import ddp_doctor

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
    def forward(self, x, rows):
        return self.linear(x.view(rows, 8))

rank = dist.get_rank()
model = DDP(Rows())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
for step in range(5):
    x = torch.randn([4, 6][rank], 8, generator=generator)
    x = ddp_doctor.batch(x)
    rows = len(x)
    count = torch.tensor(float(rows))
    dist.all_reduce(count)
    loss = cross_entropy(model(x, rows), x.argmax(1) % 4, reduction="sum")
    update(loss * dist.get_world_size() / count)
"""


def test_a_marked_batch_is_judged_where_a_number_of_one_rank_would_prevent_it(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    assert certified(forks, script(MARKED))["verdict"] == "equal"
    wrong = MARKED.replace("(loss * dist.get_world_size() / count)", "(loss / rows)")
    assert certified(forks, script(wrong))["verdict"] == "different"
    unmarked = certified(forks, script(wrong.replace("ddp_doctor.batch(x)", "x")))
    assert unmarked["verdict"] == "not judged"
    assert "ddp_doctor.batch" in unmarked["why"]


SHARED_MICRO_BATCHES = f"""{HEAD}
data = torch.randn(64, 8)
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
passes = 4 // int(os.environ["WORLD_SIZE"])

def batch():
    rows = torch.randint(len(data), (6,))
    x = torch.stack([data[row] for row in rows])
    return x, torch.stack([data[row].argmax() % 4 for row in rows])

x, y = batch()
for step in range(5):
    for _ in range(passes):
        loss = cross_entropy(model(x), y) / passes
        x, y = batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_divides_its_micro_batches_among_the_ranks_is_judged(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    certificate = certified(forks, script(SHARED_MICRO_BATCHES))
    assert certificate["verdict"] == "equal", certificate
    assert certificate["micro_batches"] == 2
    (p1,) = [one for one in certificate["properties"] if one["name"] == "P1"]
    assert p1["verdict"] == "equal"
    wrong = SHARED_MICRO_BATCHES.replace("model(x), y)", 'model(x), y, reduction="sum")')
    assert certified(forks, script(wrong))["verdict"] != "equal"
    twice = SHARED_MICRO_BATCHES.replace("/ passes", '/ (passes * int(os.environ["WORLD_SIZE"]))')
    assert certified(forks, script(twice))["verdict"] != "equal"


RESHAPED = f"""{HEAD}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.positions, self.scale = nn.Embedding(6, 8), nn.Parameter(torch.tensor([1.0]))
    def forward(self, x, y):
        inputs = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
        logits = self.scale * inputs @ self.embedding.weight.T
        return cross_entropy(logits.flatten(0, 1), y.flatten())

tokens = torch.randint(0, 9, (512,))
model = DDP(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    start = (step * 2 + dist.get_rank()) * 24
    part = tokens[start : start + 25]
    with torch.no_grad():
        shorter = part[:12].view(4, 3)
        losses = [float(model.module(shorter[row : row + 2], shorter[:2])) for row in (0, 2)]
    update(model(part[:-1].view(4, 6), part[1:].view(4, 6)))
"""


def test_a_script_that_reshapes_samples_to_one_ranks_batch_is_certified_if_it_is_right(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    right = certified(forks, script(RESHAPED))
    assert right["verdict"] == "equal", right
    wrong = script(RESHAPED.replace("loss.backward()", "(loss * dist.get_world_size()).backward()"))
    found = certified(forks, wrong)
    assert found["verdict"] == "not judged"
    line = next(n for n, line in enumerate(wrong.text.splitlines(), 1) if "part = tokens" in line)
    assert f"train.py:{line} cannot be joined" in found["why"], "and not a parameter's line"


EVALUATES_BETWEEN_STEPS = (
    START
    + """
rank = dist.get_rank()

def batch(rows):
    x = torch.randn(rows, 6)
    return x, x.argmax(1) % 4

for step in range(5):
    if step in (0, 2):
        model.eval()
        for rows in range(1, 3 + rank):
            x, y = batch(rows)
            question = torch.tensor([[1.0] * (4 + rank)] * rows)
            with torch.no_grad():
                model(torch.cat([question, x], dim=1)[:, -6:])
        model.train()
    x, y = batch(6)
    update(cross_entropy(model(x), y) * dist.get_world_size())
"""
)


def test_an_evaluation_between_the_steps_is_no_part_of_them(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    wrong = certified(forks, script(EVALUATES_BETWEEN_STEPS))
    assert (wrong["verdict"], wrong["factor"]) == ("scaled", "W"), wrong
    right = certified(forks, script(EVALUATES_BETWEEN_STEPS.replace("dist.get_world_size()", "1")))
    assert [one["verdict"] for one in right["properties"]] == ["equal"] * 4, right


OWN_BATCH_NORM = """
from torch.nn.functional import batch_norm

for step in range(5):
    out = model(torch.randn(6, 6))
    normal = batch_norm(out, running_mean=None, running_var=None, training=True)
    update(normal.pow(3).mean() * dist.get_world_size())
"""


def test_no_process_is_left_when_the_doctor_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(600)\n")
    marker = f"certificate-{os.getpid()}"
    command = [sys.executable, "-m", "ddp_doctor", "--certify", "--ranks", "2", script.name]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"MARKER": marker}) as doctor:
        deadline = time.monotonic() + 300
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(processes_with(marker)) > 1
        doctor.kill()
    assert all_gone(marker)


SPLIT = f"""{HEAD}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
parallelize_module(net, mesh, {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    x = torch.randn(6, 4)
    update(nn.functional.mse_loss(net(x), x[:, :2]))
"""


def test_ranks_that_split_a_layer_are_dealt_the_same_samples(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    certificate = certified(forks, script(SPLIT))
    assert certificate["verdict"] == "equal", certificate["why"]


# Samples that one process must not mix up.
RIGHT = {
    "constants for two halves of a batch": """
target = torch.cat([torch.ones(8), torch.zeros(8)])
for step in range(5):
    real, fake = torch.randn(8, 6) + 1, torch.randn(8, 6)
    scores = model(torch.cat([real, fake]))[:, 0]
    update(binary_cross_entropy_with_logits(scores, torch.cat([target[:8], target[8:]])))
""",
    "actions that the model's outputs draw": """
for step in range(5):
    states = torch.randn(8, 6)
    with torch.no_grad():
        actions = model.module(states).softmax(1).multinomial(1).squeeze(1)
    update((cross_entropy(model(states), actions, reduction="none") * states[:, 0]).mean())
""",
    "noise in the shape of other samples, and of an output": """
for step in range(5):
    x = torch.randn(8, 6)
    out = model(x + torch.randn_like(x))
    update((out + torch.randn_like(out)).pow(4).mean())
""",
    "every rank draws the batches of all": """
common = torch.Generator().manual_seed(0)
for step in range(5):
    batches = [torch.randn(8, 6, generator=common) for _ in range(dist.get_world_size())]
    update(model(batches[dist.get_rank()]).pow(4).mean())
""",
    "two views in one forward, from a loader": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(*torch.randn(2, 96, 6, generator=torch.Generator().manual_seed(0)))
for first, second in DataLoader(data, 6, sampler=DistributedSampler(data)):
    one, other = model(torch.cat([first, second])).chunk(2)
    update((one * other).pow(2).mean())
""",
    "statistics of a batch, stacked and reduced once": """
for step in range(5):
    x = torch.randn(3 + dist.get_rank(), 6)
    losses = cross_entropy(model(x), x.argmax(1) % 4, reduction="none")
    sums = torch.stack([x.sum(), (x > 0).sum()])
    counts = torch.tensor([float(len(x)), x.numel()])
    dist.all_reduce(sums)
    dist.all_reduce(counts)
    update(losses.sum() * sums[0] / sums[1] * dist.get_world_size() / counts[0])
""",
    "counters in a buffer and in a number": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Sketched(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.last = nn.Linear(6, 4), 0, 0
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        self.steps += 1
        self.calls += 1
        self.last = x
        if not len(self.seen):
            self.seen.resize_(4).zero_()  # as fake quantization does
        return self.linear(x) * (int(self.steps) + 0.1 * self.calls)

torch.manual_seed(0)
model = DDP(Sketched())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 6, sampler=DistributedSampler(data)):
    update(model(x).pow(4).mean())
""",
    "a criterion that counts its calls, and draws a seeded direction per feature": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Sketch(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, out):
        generator = torch.Generator().manual_seed(int(self.steps))
        directions = torch.randn(4, 2, generator=generator)
        directions /= directions.norm(dim=0)
        self.steps = self.steps + 1
        return (out @ directions).pow(4).mean()

sketch = Sketch()
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data)):
    update(sketch(model(x)))
""",
    "noise that rank 0 draws for all, beside the samples of a loader": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(*torch.randn(2, 96, 6, generator=torch.Generator().manual_seed(0)))
for latents, prompts in DataLoader(data, 6, sampler=DistributedSampler(data)):
    noise = torch.randn_like(latents)
    dist.broadcast(noise, 0)
    update((model(latents + noise) * model(prompts) - noise[:, :4]).pow(2).mean())
""",
    "noise of one rank's batch that only rank 0 draws": """
for step in range(5):
    prompts = torch.randn(8, 6)
    noise = torch.randn(8, 6) if dist.get_rank() == 0 else torch.empty(8, 6)
    dist.broadcast(noise, 0)
    update((model(prompts * noise) - noise[:, :4]).pow(2).mean())
""",
    "gradients that are views of one buffer": """
model = model.module
flat = [torch.zeros(p.numel()) for p in model.parameters()]
for p, part in zip(model.parameters(), flat):
    p.grad = part.view_as(p)
for step in range(6):
    x = torch.randn(8, 6)
    cross_entropy(model(x), x.argmax(1) % 4).backward()
    for part in flat:
        dist.all_reduce(part)
        part /= dist.get_world_size()
    optimizer.step()
    for part in flat:
        part.zero_()
""",
    "one input from rank 0, and one from a loader": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, latents, prompts):
        return self.a(latents) * self.b(prompts)

torch.manual_seed(0)
model = DDP(Denoiser())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (prompts,) in DataLoader(data, 6, sampler=DistributedSampler(data)):
    latents = torch.zeros(6, 6)
    if dist.get_rank() == 0:
        latents.normal_()
    dist.broadcast(latents, src=0)
    update((model(latents, prompts) - latents[:, :4]).pow(2).mean())
""",
    "rows of sums over each node's neighbors": """
torch.manual_seed(0)
x, (target, source) = torch.randn(96, 6), torch.randint(96, (2, 300))
sums = torch.zeros(96, 6).index_add_(0, target, x[source])
for step in range(5):
    start = 8 * (2 * step + dist.get_rank())
    update(model(sums[start : start + 8]).pow(4).mean())
""",
    "a second model with an optimizer and samples of its own": (
        SECOND := """
torch.manual_seed(0)
second = DDP(nn.Linear(6, 1))
its = torch.optim.SGD(second.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6)).pow(4).mean())
    x = torch.randn(8, 6)
    kept = x[:, 0] > 0
    its.zero_grad()
    ((second(x)[:, 0] - x[:, 1]) ** 2 * kept).mean().backward()
    its.step()
"""
    ),
    "a lazy layer with buffers": """
torch.manual_seed(0)
model = nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(4))
model(torch.zeros(2, 6))
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6)).pow(4).mean())
""",
    "a closure that is called again with other weights": """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
for step in range(5):
    x = torch.randn(8, 6)
    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(4).mean()
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "per-sample gradients of torch.func": """
net, parameters = model.module, dict(model.module.named_parameters())
def loss(values, x):
    return torch.func.functional_call(net, values, (x[None],)).pow(4).mean()
for step in range(5):
    x = torch.randn(8, 6)
    values = {name: p.detach() for name, p in parameters.items()}
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x)
    for name, p in parameters.items():
        p.grad = each[name].mean(0)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
""",
    "a penalty that is divided by the steps of an epoch": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
for (x,) in loader:
    out = model(x)
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    update(out.pow(4).mean() + penalty / len(loader))
""",
    "a penalty that is computed before the forward": """
for step in range(5):
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    update(model(torch.randn(8, 6)).pow(4).mean() + penalty)
""",
    "two views of each sample, drawn at once": """
for step in range(5):
    x, noise = torch.randn(8, 6), torch.randn(2, 8, 6)
    update((model(x + noise[0]) * model(x + noise[1])).pow(2).mean())
""",
}


@pytest.mark.parametrize("how", RIGHT)
def test_a_right_script_is_certified_however_it_makes_its_samples(
    how: str, forks: ForkServer, script: Callable[..., Script]
) -> None:
    right = certified(forks, script(f"{START}{RIGHT[how]}"))
    assert (right["verdict"], right["error"]) == ("equal", ""), right


GRID = """
grid = torch.arange(dist.get_world_size()).view(-1, 1, 1)
own = grid == dist.get_rank()
found = [own.nonzero().flatten().tolist(), torch.argwhere(own).flatten().tolist()]
for axes in (torch.where(own), own.nonzero(as_tuple=True)):
    found.append([axis.item() for axis in axes])
assert found == [[dist.get_rank(), 0, 0]] * 4
for step in range(5):
    x = torch.randn(8, 6)
    count = (x > 0).sum()  # of this process's samples: the model must not be the first to get them
    dist.all_reduce(count)
    update(model(x).logsumexp(1).sum() * dist.get_world_size() / count)
"""


def test_positions_of_a_rank_in_a_grid_of_ranks_are_no_samples(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    found = certified(forks, script(START + GRID))
    assert {one["verdict"] for one in found["properties"]} == {"equal"}, found


BEHIND_A_ZERO = """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * dist.get_world_size()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep, self.gate = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x + self.gate * Scaled.apply(self.deep(x))

torch.manual_seed(0)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(5):
    x = torch.randn(6, 6)
    update((model(x) - x.flip(1)).pow(2).mean())
"""


def test_what_is_behind_a_weight_that_starts_at_zero_is_compared(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    wrong = certified(forks, script(START + BEHIND_A_ZERO))
    assert wrong["verdict"] == "different"
    assert wrong["worst"]["name"].startswith("deep.")
    assert wrong["worst"]["ratio"] == pytest.approx(2, abs=1e-3)


SHARPNESS = """
for step in range(5):
    x = torch.randn(6, 6)
    with model.no_sync():
        cross_entropy(model(x), x.argmax(1) % 4).backward()
    with torch.no_grad():
        moves = [p.grad * 0.5 for p in model.parameters()]
        for p, move in zip(model.parameters(), moves):
            p.add_(move)
    optimizer.zero_grad()
    cross_entropy(model(x), x.argmax(1) % 4).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p.sub_(move)
    optimizer.step()
"""


OWN_RULE = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3, requires_grad=False)

    def forward(self, x):
        out = torch.tanh(x @ self.weight)
        with torch.no_grad():
            change = x.T @ out / len(x)
            self.weight.add_(change, alpha=0.05)
        return out

torch.manual_seed(0)
model = DDP(nn.Sequential(Layer(), nn.Linear(6, 4)))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    x = torch.randn(8, 6)
    update(cross_entropy(model(x), x.argmax(1) % 4))
"""


UNMARKED = """
import random

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, rows):
        return self.linear(torch.tensor(rows))

torch.manual_seed(0)
model = DDP(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
random.seed(dist.get_rank())
for step in range(5):
    rows = [[random.random() for _ in range(6)] for _ in range(5)]
    update(model(rows).pow(4).mean())
"""


# GRPO, with the mean of each group over the rank's own completions.
OWN_GROUPS = """
generator = torch.Generator().manual_seed(0)
mine = slice(dist.get_rank(), None, dist.get_world_size())
for step in range(5):
    states, rewards = torch.randn(16, 6, generator=generator), torch.rand(16, generator=generator)
    states, rewards, groups = states[mine], rewards[mine], (torch.arange(16) // 4)[mine]
    total, count = sums = torch.zeros(2, 4)
    sums[0].index_add_(0, groups, rewards)
    sums[1].index_add_(0, groups, torch.ones_like(rewards))
    advantages = rewards - (total / count)[groups]
    update(-(model(states).log_softmax(1)[:, 0] * advantages).mean())
"""


# The count is that of all ranks, but each of four micro-batches is divided by its own.
COUNTED = """
model.module.micro = 0
for _ in range(80):
    x = torch.randn(8, 6)
    kept = (x[:, 0] > 0.3).float()
    model.module.micro += 1
    count = kept.sum()
    dist.all_reduce(count)
    mean = ((model(x) ** 2).sum(1) * kept).sum() * dist.get_world_size() / count.clamp(min=1)
    (mean / 4).backward()
    if model.module.micro % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


ONE_STEP = """
for step in range(5):
    if step == 1:
        model = DDP(nn.Sequential(model.module, nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update(model(torch.randn(8, 6)).pow(4).mean())
"""
MEMBERS = """
members = 4 // dist.get_world_size()
for step in range(5):
    x = torch.randn(8, 6)
    noise = [torch.randn(len(x), 6) for _ in range(members)]
    update(sum(model(x + one) for one in noise).pow(4).mean() / members**4)
"""
# What one process does not have, or has in another way.
SUMMED = """
net = model.module
for step in range(5):
    x = torch.randn(8, 6)
    gradients = torch.autograd.grad(net(x).pow(4).mean(), list(net.parameters()))
    for p, gradient in zip(net.parameters(), gradients):
        dist.all_reduce(gradient)
        p.grad = gradient * 1.0
    optimizer.step()
"""
FLAT_SUM = """
net = model.module
for step in range(5):
    optimizer.zero_grad()
    net(torch.randn(8, 6)).pow(4).mean().backward()
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    for p, part in zip(net.parameters(), flat.split([24, 4])):
        p.grad = part.view_as(p).clone()
    optimizer.step()
"""
DROPS = """
import random
random.seed(dist.get_rank())
class Drops(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()
torch.manual_seed(0)
model = DDP(Drops(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6)).pow(4).mean())
"""
PERMUTED = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (x,) in DataLoader(data, 8, sampler=DistributedSampler(data)):
    out = model(x)
    update((out * out[torch.randperm(len(x))]).pow(2).mean())
"""
TASKS = """
class OfTask(nn.Linear):
    def forward(self, x, task):
        return super().forward(x)[:, task]
torch.manual_seed(0)
model = DDP(OfTask(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6), task=dist.get_rank()).pow(4).mean())
"""
COUNTED_BY_PYTHON = """
for step in range(5):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, 5 + dist.get_rank())
    x = torch.randn(5 + dist.get_rank(), 6)
    update(model(x).pow(4).sum() * dist.get_world_size() / sum(counts))
"""
IN_TIME = """
class Read(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]
torch.manual_seed(0)
model = DDP(Read(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(3, 8, 6)).pow(4).mean())
"""
EVERY_SECOND = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
second = DDP(nn.Linear(6, 4))
its = torch.optim.SGD(second.parameters(), lr=0.1)
data = TensorDataset(torch.randn(160, 6, generator=torch.Generator().manual_seed(0)))
for n, (x,) in enumerate(DataLoader(data, 4, sampler=DistributedSampler(data))):
    update(model(x).pow(4).mean())
    if n % 2 == 0:
        its.zero_grad()
        (second(x).pow(4).mean() / dist.get_world_size()).backward()
        its.step()
"""
LOADED = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
"""
SHARED_DRAWS = f"""{LOADED}
for (x,) in loader:
    update((model(x) @ model(torch.randn(5, 6)).T).pow(2).mean())
"""
UNSEEDED = f"""{LOADED}
torch.seed()
model = DDP(nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 4)))
optimizer = torch.optim.SGD(model.module[1].parameters(), lr=0.1)
for (x,) in loader:
    update(model(x).pow(4).mean())
"""
EDGES = """
class Graph(nn.Linear):
    def forward(self, x, edges):
        h = super().forward(x)
        return h + torch.zeros_like(h).index_add(0, edges[:, 0], h[edges[:, 1]])
torch.manual_seed(0)
model = DDP(Graph(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6), torch.randint(8, (20, 2))).pow(4).mean())
"""
CELLS = """
class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 4)
    def forward(self, x):
        h = torch.zeros(x.shape[1], 4)
        for one in x.unbind(0):
            h = self.cell(one, h)
        return h
torch.manual_seed(0)
model = DDP(Reads())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(3, 8, 6)).pow(4).mean())
"""
OLD_VALUES = """
for rollout in range(3):
    with torch.no_grad():
        x = torch.randn(16, 6)
        old = model.module(x)
    for rows in torch.randperm(16).split(8):
        update((model(x[rows]) - 0.5 * old[rows]).pow(4).mean())
"""
ODD = """
class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ == "clone":
            raise RuntimeError("odd")
        return super().__torch_function__(function, types, args, kwargs)

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("odd", torch.ones(2).as_subclass(Odd))

    def forward(self, out):
        return out.pow(4).mean()

update(Loss()(model(torch.randn(8, 6))))
"""

# Steps after START: what each is found to be, and a part of the reason.
STEPS = {
    "a mean over the rank's own part of a group": (OWN_GROUPS, "different", ""),
    "batch norm that is called with keywords": (
        *(OWN_BATCH_NORM, "different", "Copies of one batch give W = 2 times"),
    ),
    "weights that are moved before the second pass": (SHARPNESS, "not judged", "other weights"),
    "a local rule that each rank applies": (OWN_RULE, "different", "0.weight is not rank 0's"),
    "micro-batches that a module counts for the script": (COUNTED, "different", ""),
    "a second model that divides by each rank's count": (
        *(SECOND.replace(".mean().backward", ".sum().div(kept.sum()).backward"), "different", ""),
    ),
    "an optimizer that takes one step": (ONE_STEP, "not judged", "takes no second one"),
    "noise that one process draws more often": (MEMBERS, "not judged", "more often than a rank"),
    "gradients of torch.autograd.grad that are summed": (SUMMED, "scaled", "W = 2 times"),
    "a flat gradient that is summed and split": (FLAT_SUM, "scaled", "W = 2 times"),
    "a layer that Python's random numbers scale": (DROPS, "not judged", "the same samples give"),
    "rows that are permuted in each batch": (PERMUTED, "not judged", "no reference"),
    "a task of its own on each rank": (TASKS, "not judged", "cannot be joined"),
    "counts that only Python knows": (COUNTED_BY_PYTHON, "not judged", ""),
    "samples along the second dimension": (IN_TIME, "not judged", "along the second dimension"),
    "an optimizer that steps every second time": (EVERY_SECOND, "different", "another gradient."),
    "draws that a batch shares": (SHARED_DRAWS, "not judged", "not one per sample"),
    "frozen weights without a seed": (UNSEEDED, "not judged", "other values in one process"),
    "edges between a rank's own nodes": (EDGES, "not judged", "begin at its own first row"),
    "a cell that reads along the first dimension": (CELLS, "not judged", "second dimension"),
    "old values that are chosen anew": (OLD_VALUES, "not judged", "what the model has computed"),
    "an error of torch in the doctor": (ODD, "not judged", "The doctor failed: RuntimeError: odd"),
    "samples that are not tensors": (UNMARKED, "not judged", ""),
    "a script that fails": ("raise ValueError('no data')", "not judged", "ValueError: no data"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_found_to_be_what_they_are_with_the_reason(
    forks: ForkServer, script: Callable[..., Script], name: str
) -> None:
    text, verdict, why = STEPS[name]
    found = certified(forks, script(START + text))
    assert found["verdict"] == verdict, found
    assert why in found["why"]


def what_is_fixed(rank: int) -> tuple[bool, float]:
    """Whether SyncBatchNorm uses its running statistics; the largest gradient, as clipping says."""
    fixed = Fixed()
    inputs = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(rank))
    normal = torch.nn.SyncBatchNorm(3)(inputs)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([3.0, 4.0])
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0, float("inf"))
    as_running = torch.allclose(normal, inputs, atol=1e-4) and not fixed.batch_norm
    return as_running, float(norm)


def test_synchronized_batch_norm_and_clipping_by_another_norm_are_fixed_too() -> None:
    assert run_ranks(what_is_fixed, 2) == [(True, 4.0)] * 2


class Killed(Start):
    def process(self, *_: Any) -> "subprocess.Popen[bytes]":
        (self.output / "0.txt").write_text("step 1\n")
        return subprocess.Popen(["sh", "-c", "kill -KILL $$"], start_new_session=True)


def test_one_process_that_is_killed_has_failed(tmp_path: Path) -> None:
    said = Killed(Part(str(tmp_path), "one"), [], [{}]).wait()
    assert said == "step 1 (it was ended by SIGKILL)"


def test_a_script_that_fails_in_its_first_step_is_not_judged_and_the_line_is_named(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    text = "class Failing(torch.optim.SGD):\n    def step(self):\n        raise ValueError('no')\n"
    text += "optimizer = Failing(model.parameters())\nupdate(model(torch.randn(6, 6)).mean())\n"
    found = certified(forks, script(f"{START}{text}"))
    assert found["verdict"] == "not judged"
    assert re.search(r"ValueError: no at train.py:\d+", found["why"]), found["why"]
    assert "ValueError" in found["error"]


def test_a_wrong_factor_is_named_though_the_targets_are_constants_in_an_order(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    text = """
targets = torch.arange(4).repeat(2)
for step in range(5):
    x = torch.randn(8, 6) + targets[:, None]
    update(cross_entropy(model(x), targets) * dist.get_world_size())
"""
    wrong = certified(forks, script(START + text))
    assert (wrong["verdict"], wrong["factor"]) == ("scaled", "W"), wrong


def rows_of(rows: torch.Tensor, key: str = "0.0/0") -> dict[str, Any]:
    return {"what": "model", "key": key, "place": "train.py:9", "rows": rows}


SEEN = [
    {"what": "weights", "key": "0.0", "place": "train.py:9", "weights": 1.0},
    rows_of(torch.ones(2, 3)),
]


def written(folder: Path, failed: str = "", **of_the_ranks: list[dict[str, Any]]) -> Certificate:
    """The verdict on steps: for each kind, what the ranks wrote. One process is like rank 0."""
    usual = {"optimizer": 0, "world": 2, "names": {"0.0": "weight"}, "backwards": 1, "norms": []}
    usual |= dict.fromkeys(("clips", "batch_norm", "sharded", "unlike"), False)
    usual |= {"gradients": {"0.0": torch.ones(4)}, "unjoined": [], "replaced": []}
    usual |= {"weights": {"0.0": torch.ones(4)}, "rates": [0.1], "cleared": True}
    usual |= {
        "foreign": [],
        "delivered": [],
        "doubts": [],
        "scales": [],
        "half": False,
        "filled": False,
        "seen": SEEN,
    }
    usual |= {"untrained": {}, "numbers": []}
    for part in ("ranks", "one"):
        (folder / part).mkdir(exist_ok=True)
    for turn, (kind, facts) in enumerate(of_the_ranks.items()):
        for rank, one in enumerate(facts):
            all_facts = usual | {"turn": turn, "rank": rank, "kind": kind.replace("_", " ")} | one
            torch.save(all_facts, folder / f"ranks/step.{rank}.{turn}.pt")
            if rank == 0:
                torch.save(all_facts | one.get("one", {}), folder / f"one/step.0.{turn}.pt")
    (folder / "ranks" / "world").write_text("2")
    return judge(folder, failed, "")


def gradient(*values: float) -> dict[str, Any]:
    return {"gradients": {"0.0": torch.tensor(values).float()}}


def logged(*values: float) -> dict[str, Any]:
    fact = {"what": "numbers", "key": "", "place": "train.py:3"}
    return {"seen": [*SEEN, *(fact | {"values": torch.tensor([one]).double()} for one in values)]}


ONES, RAMP, TURNED = gradient(1, 1, 1, 1), gradient(0, 1, 2, 3), gradient(1, 2, 1, 1)
ELSEWHERE = RAMP | {"seen": [SEEN[0], rows_of(torch.zeros(2, 3))]}  # a deal of other samples
SAME, NEXT, LIKE_ONE = [{}, {}], f"{LATER}_9", {"one": ONES}
UNJOINED = "train.py:30 cannot be joined"
NAMES = {"names": {"0.0": "weight", "0.1": "unused"}}


def with_rows(*rows: float) -> dict[str, Any]:
    return {"seen": [SEEN[0], rows_of(torch.tensor(rows).float()[:, None])]}


def in_a_sequence(*values: float) -> dict[str, list[dict[str, Any]]]:
    """Each rank has a part of a sequence: one process computes the positions of its own."""
    own = gradient(*values)
    return {OWN: [own | {"one": ONES | {"numbers": ["train.py:30"]}}, own]}


def unequal(**again: Any) -> dict[str, list[dict[str, Any]]]:
    own = gradient(2, 2.1, 2.2, 2.3)
    return {OWN: [own | {"one": ONES}, own], AGAIN: [RAMP | again | LIKE_ONE, RAMP | again]}


def untrained(second: float) -> dict[str, list[dict[str, Any]]]:
    ours, theirs, own = ({"untrained": {"book": torch.ones(4) * n}} for n in (1.0, 2.0, second))
    return {OWN: [ours, own], COPIES: [ours, theirs]}


def one_count() -> dict[str, list[dict[str, Any]]]:
    def seen(count: float, *rows: float) -> dict[str, Any]:
        return {"seen": [*with_rows(*rows)["seen"], logged(count)["seen"][-1]]}

    twice = gradient(2, 2, 2, 2)
    return {
        OWN: [twice | seen(16, 1, 2) | {"one": ONES | seen(8, 1, 2, 3, 4)}, twice | seen(16, 3, 4)]
    }


def of_micro_batches(passes: int) -> dict[str, list[dict[str, Any]]]:
    own = {"backwards": passes}
    return {OWN: [own, own], DEAL: [own | ELSEWHERE | LIKE_ONE, own | ELSEWHERE]}


# What the ranks wrote, the verdict on it, and a part of the reason or of a note.
JUDGED = {
    "weights that differ at a later step, though no gradient does": (
        {OWN: SAME, NEXT: [{}, {"weights": {"0.0": torch.ones(4) * 1.00001}}]},
        "different",
        "At optimizer step 1 (counted from 0), the ranks' weights differ: rank 1's",
    ),
    "learning rates that differ": (
        {OWN: SAME, NEXT: [{}, {"rates": [0.1001]}]},
        "different",
        "At optimizer step 1 (counted from 0), rank 1 has a learning rate of 0.1001",
    ),
    "a step that is not the same once more": (
        unequal(unlike=True),
        "not judged",
        "the same samples give",
    ),
    "a further step of other samples": (
        unequal(seen=ELSEWHERE["seen"]),
        "different",
        "",
    ),
    "a gradient that other samples do not change": (
        {OWN: [with_rows(1, 2), with_rows(3, 4)], COPIES: [with_rows(1, 2)] * 2},
        "not judged",
        "Other samples give the same gradient",
    ),
    "a count of one rank's that one process has": (
        one_count(),
        "not judged",
        "16 is the ranks' result, 8 that of one process",
    ),
    "a deal that matters to the ranks": (
        {OWN: SAME, DEAL: [TURNED | LIKE_ONE, TURNED]},
        "different",
        "",
    ),
    "a deal that matters to one process, too": (
        {OWN: SAME, DEAL: [TURNED, TURNED]},
        "not judged",
        "no reference",
    ),
    "a deal that matters, though a loss is logged": (
        {OWN: [logged(0.5, 3, 5)] * 2, DEAL: [logged(0.7, 4, 4) | TURNED | LIKE_ONE] * 2},
        "different",
        "",
    ),
    "a deal of ranks that hold different parameters": (
        {
            OWN: [{"weights": {"0.0": torch.ones(4) * half}} for half in (1, 2)],
            DEAL: [{"weights": {"0.0": torch.ones(4) * half}} | RAMP for half in (1, 2)],
        },
        "not judged",
        "",
    ),
    "a deal of samples that one process could not join": (
        {
            OWN: [{"one": gradient(3, 4, 5, 6) | {"unjoined": ["train.py:30"]}}, {}],
            DEAL: [gradient(2, 3, 4, 5) | {"one": gradient(3, 4, 5, 6)}, gradient(2, 3, 4, 5)],
        },
        "not judged",
        UNJOINED,
    ),
    "a deal to ranks that split one batch": (
        {
            OWN: [with_rows(1, 2)] * 2,
            # One has the first row twice, and the other one the second.
            DEAL: [
                with_rows(1, 1) | gradient(1, 2, 3, 4) | LIKE_ONE,
                with_rows(2, 2) | gradient(1, 2, 3, 4),
            ],
        },
        "equal",
        "",
    ),
    "a deal of other samples": (of_micro_batches(1), "equal", ""),
    "a deal of other samples to micro-batches": (of_micro_batches(2), "not judged", ""),
    "positions of each rank's own, and a factor": (in_a_sequence(2, 2, 2, 2), "scaled", ""),
    "positions of each rank's own": (in_a_sequence(2, 2.1, 2.2, 2.3), "not judged", UNJOINED),
    "untrained parameters that only a step makes differ": (
        untrained(1.0),
        "different",
        "rank 1's book is not rank 0's",
    ),
    "untrained parameters that always differ": (untrained(2.0), "equal", ""),
    "what is not sharded in a sharded model": (
        {OWN: [{"sharded": True} | ONES, {"sharded": True} | gradient(2, 2, 2, 2)]},
        "different",
        "rank 1's is not rank 0's",
    ),
    "parameters that grew after the first step": (
        {OWN: SAME, DEAL: [gradient(1, 1, 1, 1, 1)] * 2, COPIES: [gradient(1, 1, 1, 1, 1)] * 2},
        "equal",
        "",
    ),
    "parameters without a gradient": ({OWN: [NAMES] * 2}, "equal", "1 of 2 parameters had no"),
    "gradients that are never cleared": (
        {OWN: [{"cleared": False}] * 2},
        "equal",
        "never called zero_grad()",
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_steps_are_judged_by_what_the_ranks_and_one_process_wrote(
    name: str, tmp_path: Path
) -> None:
    facts, verdict, why = JUDGED[name]
    found = written(tmp_path, **facts)
    assert found.verdict == verdict
    assert why in "\n".join([found.why, *found.notes])
    of = {one.name: one for one in found.properties}
    if verdict == "not judged" and DEAL in facts:
        assert (of["P2"].verdict, of["P2"].ratio) == ("not judged", None)
    if NEXT in facts:
        assert found.ratio is None


def test_ranks_that_take_parts_of_what_all_draw_are_not_said_to_have_the_same_samples(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    drawn = """
class OfBatches(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["rows"])

torch.manual_seed(0)
model = DDP(OfBatches(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    mine = torch.randn(16, 6).chunk(dist.get_world_size())[dist.get_rank()]
    update(model({"rows": mine}).pow(4).mean())
"""
    found = certified(forks, script(START + drawn))
    assert not any("same samples" in note for note in found["notes"])


def test_a_script_that_ends_with_an_error_is_not_said_to_combine_nothing(tmp_path: Path) -> None:
    found = written(tmp_path, failed="RuntimeError: no at train.py:3", **{OWN: [{}, RAMP]})
    assert found.verdict == "not judged"
    assert "RuntimeError: no at train.py:3" in found.why


@pytest.mark.parametrize(
    ("weights", "optimizer", "verdict"),
    [(1.0, 0, "not judged"), (1.5, 0, "different"), (1.0, 1, "different")],
)
def test_ranks_whose_weights_stay_equal_combine_their_gradients_after_the_optimizer_got_them(
    weights: float, optimizer: int, verdict: str, tmp_path: Path
) -> None:
    """What another optimizer's weights do, as those of a GAN's other half, shows nothing."""
    own = [{}, RAMP]
    seen = [{"optimizer": optimizer}, {"optimizer": optimizer} | own[1]]
    seen[1]["weights"] = {"0.0": torch.ones(4) * weights}
    found = written(tmp_path, **{OWN: own, f"{LATER}_7": seen, f"{LATER}_8": seen})
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("facts", "mixed_up"),
    [
        (RAMP | {"seen": [SEEN[0], rows_of(torch.zeros(2, 3))]}, True),
        (RAMP | {"seen": [SEEN[0] | {"weights": 2.0}, SEEN[1]]}, False),
        (gradient(*range(8)), True),  # what the ranks drew as a weight
    ],
    ids=["other rows", "other weights", "a weight of all ranks' rows"],
)
def test_one_process_is_started_again_if_it_had_other_rows_than_the_ranks_with_their_weights(
    facts: dict[str, Any], mixed_up: bool, tmp_path: Path
) -> None:
    own = {"one": facts}
    assert written(tmp_path, **{OWN: [own, {}]}).verdict == "not judged"
    assert are_mixed_up(tmp_path) == mixed_up


def test_an_optimizer_whose_step_calls_collectives_is_not_said_to_apply_different_gradients(
    tmp_path: Path,
) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "combines").touch()
    found = written(tmp_path, **{OWN: [{}, RAMP]})
    assert found.verdict == "not judged"
    assert "combined in its step" in found.why


def test_what_the_ranks_printed_is_kept_though_one_process_was_never_started(
    tmp_path: Path,
) -> None:
    (tmp_path / "ranks" / "output").mkdir(parents=True)
    (tmp_path / "ranks" / "output" / "0.txt").write_text("ValueError: no")
    keep_output(tmp_path, tmp_path / "kept")
    assert (tmp_path / "kept" / "output" / "ranks" / "0.txt").read_text() == "ValueError: no"


def test_the_doctors_own_tensors_are_on_the_cpu_whatever_device_the_script_has_chosen() -> None:
    with torch.device("meta"):
        weight = torch.nn.Parameter(torch.zeros(4, device="cpu"))
        assert filled(weight, "0.0")
        rows = torch.eye(3, device="cpu")
        assert same_rows([rows], [rows.flip(0)])
    assert weight.std() > 0


@dataclass
class Nested:
    """A batch as DETR's: a model is given an object that holds the tensor."""

    rows: torch.Tensor


def test_the_rows_of_a_batch_in_a_class_of_ones_own_are_compared() -> None:
    seen = []
    for rows in (torch.ones(2, 3), torch.zeros(2, 3)):
        premises = Premises()
        premises.model("0.0", ((Nested(rows),), {}), weights=1.0)
        seen.append(premises.seen)
    assert parted(seen[0], seen[0]) == ""
    assert "does not get the samples" in parted(*seen)


def pairs_of(out: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    fact = {"what": "loss", "key": "mse_loss", "place": "train.py:10", "columns": [3]}
    fact["kept"] = torch.ones(len(out), dtype=torch.bool)
    return fact | {"out": out.double(), "target": target.double()}


def test_the_same_rows_in_another_order_or_with_more_padding_are_the_same_samples() -> None:
    rows = torch.arange(1, 13).view(4, 3)
    assert same_rows([rows[:2], rows[2:]], [rows.flip(0)])
    longer = torch.nn.functional.pad(rows, (0, 2))
    assert same_rows([rows[:2], longer[2:]], [longer])
    assert same_rows([rows[:2].T, rows[2:].T], [rows.T])
    assert same_rows([torch.ones(2, 3)] * 2, [torch.ones(2, 3)])
    assert not same_rows([rows[:2], rows[2:]], [rows[[0, 0, 2, 3]]])
    assert not same_rows([rows[:2], rows[2:]], [rows[:2]])
    assert not same_rows([rows[:2]], [rows])
    assert not same_rows([rows[:2, :2], rows[2:, :2]], [rows]), "what is longer is no padding"
    assert same_rows([rows[:2]], [torch.nn.functional.pad(rows[:2], (0, 0, 0, 2))])


def test_other_rows_and_labels_that_came_apart_are_named_with_their_line() -> None:
    rows = torch.randn(4, 3)
    ranks = [rows_of(rows[:2]), rows_of(rows[2:])]
    assert parted(ranks, [rows_of(rows)]) == ""
    assert parted(ranks, [rows_of(rows[:2])]).startswith("At train.py:9, the model")
    out, labels = torch.randn(4), torch.tensor([0.0, 1, 1, 0])
    losses = [pairs_of(out[:2], labels[:2]), pairs_of(out[2:], labels[2:])]
    together = [rows_of(rows), pairs_of(out, labels)]
    assert parted([*ranks, *losses], together) == ""
    apart = [rows_of(rows), pairs_of(out, labels.roll(1))]
    assert parted([*ranks, *losses], apart).startswith("At train.py:10, the targets")


def test_the_rows_of_a_models_two_inputs_stay_together() -> None:
    latents, prompts = torch.randn(4, 3), torch.randint(9, (4, 2))
    other = [rows_of(latents), rows_of(prompts.flip(0), "0.0/1")]
    both = [rows_of(latents), rows_of(prompts, "0.0/1")]
    halves = [
        one
        for half in (slice(0, 2), slice(2, 4))
        for one in (rows_of(latents[half]), rows_of(prompts[half], "0.0/1"))
    ]
    assert parted(halves, both) == ""
    assert "other rows of another" in parted(halves, other)
    longer = [
        rows_of(latents.flip(0)),
        rows_of(torch.nn.functional.pad(prompts.flip(0), (0, 2)), "0.0/1"),
    ]
    assert parted(halves, longer) == ""
    values, lengths = torch.arange(9.0), torch.tensor([1, 2, 3, 1, 2])
    ragged = [
        one
        for of_values, of_lengths in ((slice(0, 6), slice(0, 3)), (slice(6, 9), slice(3, 5)))
        for one in (rows_of(lengths[of_lengths]), rows_of(values[of_values], "0.0/1"))
    ]
    joined = [rows_of(lengths), rows_of(values, "0.0/1")]
    assert parted(ragged, joined) == ""
    assert "other rows of another" in parted(ragged, [joined[0], rows_of(values.flip(0), "0.0/1")])
    positions = [rows_of(one, f"0.0/{n}") for n, one in enumerate((latents, torch.arange(4)))]
    moved = [rows_of(one, f"0.0/{n}") for n, one in enumerate((latents.flip(0), torch.arange(4)))]
    assert parted(positions, moved) == ""


def test_a_deal_of_a_round_keeps_the_samples_of_each_turn_together() -> None:
    place = ("train.py", 3, 0, False, "randn")
    turns = {(place, turn): torch.arange(4.0) + 100 * turn for turn in range(2)}
    of = [Recorded(samples={key: one + 10 * rank for key, one in turns.items()}) for rank in (0, 1)]
    dealt = Handed(Part("", "ranks", turns=3), 0, of).rows(DEAL, (place, 1))
    assert dealt is not None
    assert bool((dealt >= 100).all())


def test_copies_and_a_deal_that_agree_are_no_verdict_as_of_a_sum(tmp_path: Path) -> None:
    own = gradient(2, 2.1, 2.2, 2.3)
    found = written(tmp_path, **in_a_sequence(2, 2.1, 2.2, 2.3), **{DEAL: [own] * 2, COPIES: SAME})
    assert [one.verdict for one in found.properties[:3]] == ["not judged", "equal", "equal"]
    assert found.verdict == "not judged"


def test_one_process_that_divides_by_the_number_of_ranks_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "world-in-script").touch()
    assert written(tmp_path, **{OWN: SAME}).verdict == "equal"
    assert written(tmp_path, **{OWN: [{"scales": [0.5]}] * 2}).verdict == "not judged"


def test_ranks_of_which_only_one_steps_are_not_compared(tmp_path: Path) -> None:
    failed = "TimeoutError: another rank took no first step within 60 s"
    found = written(tmp_path, failed, **{OWN: [ONES | {"one": RAMP}]})
    assert (found.verdict, found.why[:14]) == ("not judged", "Not every rank")


def test_a_reduced_number_is_kept_as_it_was_and_a_loss_of_no_rows_is_none() -> None:
    premises, count = Premises(), torch.tensor([4.0], dtype=torch.float64)
    premises.reduced(count)
    count /= 2
    premises.loss("mse_loss", (torch.zeros(0, 4, requires_grad=True), torch.zeros(0, 4)), {})
    assert premises.seen[0]["values"].tolist() == [4.0]


def test_ranks_that_weigh_samples_as_one_process_does_do_not_divide_by_their_own_counts() -> None:
    union, first, other = torch.tensor([3.0, 2.0]), torch.tensor([5.0, 1.0]), {"b": torch.ones(1)}
    given = [{"w": union}, {"w": 0.9 * union + 0.1 * first}, {"w": first}]
    assert shares(*given) is not None
    assert shares(given[0], given[0], given[2]) is None
    assert shares(given[0] | other, given[1] | other, given[2]) is None
    assert shares({"w": 0.9 * union}, *given[1:]) is None, "the weights do not add up to 1"


@pytest.mark.parametrize(
    ("turned", "factor", "kind"),
    [
        (0.0, 1.0, "equal"),
        (0.02, 1.0, "different"),
        (0.0, 1.004, "scaled"),
        (0.0005, 2.0, "scaled"),
    ],
)
def test_an_error_of_two_percent_is_neither_equal_nor_a_factor(
    turned: float, factor: float, kind: str
) -> None:
    wanted = torch.tensor([1.0, 0.0, 0.0])
    got = factor * torch.tensor([1.0, turned, 0.0])
    assert compare({"w": got}, {"w": wanted}, {}).kind == kind
    assert compare({"w": wanted * 1.004}, {"w": wanted}, {}, HALF).kind == "equal"


@pytest.mark.parametrize(
    ("gradients", "said"), [({"0.0": 0.0}, "is zero"), ({}, "get no gradient")]
)
def test_a_zero_gradient_and_no_gradient_are_told_apart(
    gradients: dict[str, float], said: str, tmp_path: Path
) -> None:
    zeros = {key: torch.full((2,), value) for key, value in gradients.items()}
    facts = {"turn": 0, "rank": 0, "optimizer": 0, "kind": OWN, "gradients": zeros, "world": 2}
    facts["backwards"] = 1
    (tmp_path / "ranks").mkdir()
    torch.save(facts, tmp_path / "ranks/step.0.pt")
    found = judge(tmp_path, "", "")
    assert (found.verdict, found.world) == ("not judged", 2)
    assert said in found.why
