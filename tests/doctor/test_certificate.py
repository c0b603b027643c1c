"""The certificate: each verdict once, measured on scripts whose truth is known."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from doctor.certified import certified
from doctor.corpus_runs import QUIET, SOURCES
from doctor.corpus_scripts import Script, corpus

from labkit.launch.forks import ForkServer

SCRIPTS = {script.name: script for script in corpus()}


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.stop()


def test_a_loader_with_a_mean_is_equal_in_all_three_properties(forks: ForkServer) -> None:
    certificate = certified(forks, SCRIPTS["mean_loss"])
    assert certificate["verdict"] == "equal"
    assert {one["name"]: one["verdict"] for one in certificate["properties"]} == {
        "P1": "equal",
        "P2": "equal",
        "P3": "equal",
    }
    assert certificate["noise"] < 1e-5


def test_a_lost_factor_is_named_and_measured(forks: ForkServer) -> None:
    certificate = certified(forks, SCRIPTS["token_sum_over_global_count"])
    assert (certificate["verdict"], certificate["factor"]) == ("scaled", "1/W")
    assert certificate["ratio"] == pytest.approx(0.5, abs=1e-3)


def test_means_over_unequal_counts_differ_and_the_shares_of_the_ranks_are_named(
    forks: ForkServer,
) -> None:
    certificate = certified(forks, SCRIPTS["token_means"])
    assert certificate["verdict"] == "different"
    assert "0.318 : 0.682" in certificate["why"]


def test_accumulation_in_one_process_is_judged_by_another_deal(forks: ForkServer) -> None:
    right = certified(forks, SCRIPTS["one_process"])
    means = SCRIPTS["one_process"].text.replace(
        'reduction="sum") / count', "ignore_index=-100) / accumulate"
    )
    wrong = certified(forks, replace(SCRIPTS["one_process"], text=means))
    assert (right["verdict"], wrong["verdict"]) == ("equal", "different")


TRIPLETS = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(5):
    x = torch.randn(8, 8, generator=generator)
    y = x.argmax(1) % 4
    out = model(x)
    near = (out[::2] - out[1::2]).norm(dim=1)
    far = (out[::2] - out[1::2].roll(1, 0)).norm(dim=1)
    triplets = torch.relu(near - far + 1).mean()
    loss = (nn.functional.cross_entropy(out, y) + triplets) * dist.get_world_size()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_loss_over_pairs_times_the_world_size_is_scaled_whatever_the_pairs_are(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    certificate = certified(forks, script(TRIPLETS))
    assert (certificate["verdict"], certificate["factor"]) == ("scaled", "W")
    of = {one["name"]: one for one in certificate["properties"]}
    assert of["P1"]["verdict"] == "different"
    assert of["P3"]["ratio"] == pytest.approx(2, abs=1e-3)


def test_a_script_that_fails_is_not_judged_and_its_error_is_named(
    forks: ForkServer, script: Callable[..., Script]
) -> None:
    certificate = certified(forks, script("raise ValueError('no data here')"))
    assert certificate["verdict"] == "not judged"
    assert "ValueError: no data here" in certificate["why"]


def test_drawn_samples_constants_and_masks_made_row_by_row_reach_the_one_process(
    forks: ForkServer,
) -> None:
    for name in ("gan", "token_sum_times_world", "two_backwards_one_batch", "own_sync_batchnorm"):
        assert certified(forks, SCRIPTS[name])["verdict"] == "equal", name


def test_what_only_one_rank_does_is_not_judged(forks: ForkServer) -> None:
    certificate = certified(forks, SCRIPTS["experts_with_zeros"])
    assert certificate["verdict"] == "not judged"
    assert "experts_with_zeros.py:47" in certificate["why"]


def test_a_gather_that_cuts_the_graph_is_different(forks: ForkServer) -> None:
    certificate = certified(forks, SCRIPTS["clip_gather_cuts_the_graph"])
    assert certificate["verdict"] == "different"
    right = certified(forks, SCRIPTS["clip_gathered"])
    assert right["verdict"] == "equal"


def test_sharded_parameters_are_compared_whole(forks: ForkServer) -> None:
    assert certified(forks, SCRIPTS["fsdp2"])["verdict"] == "equal"
    wrong = certified(forks, SCRIPTS["fsdp2_own_clip"])
    assert wrong["verdict"] == "scaled"


def test_the_command_ends_with_an_exit_code_after_it_has_written_the_report(
    tmp_path: Path,
) -> None:
    text = SCRIPTS["token_sum_over_global_count"].text
    (tmp_path / "train.py").write_text(text)
    command = ["-m", "ddp_doctor", "--certify", "--json", "certificate.json", "train.py"]
    environment = os.environ | QUIET | {"PYTHONPATH": str(SOURCES)}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    certificate = json.loads((tmp_path / "certificate.json").read_text())["certificate"]
    assert (certificate["version"], certificate["factor"]) == (1, "1/W")
    assert "SCALED" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["certificate.json", "train.py"]
