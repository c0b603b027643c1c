"""The reference pages: names that exist, and a script that runs."""

import importlib
import os
import re
from pathlib import Path

import nbformat
import pytest
import torch.nn.parallel.distributed as torchs
from in_process import run_in_process
from torch.distributed import utils

from ddp_doctor.explain.findings import CATALOG
from labkit.book.repeated import named
from labkit.launch import project_root
from labkit.launch.nodes import run_warm
from miniddp import buckets, replicas
from miniddp.ddp import MiniDDP
from miniddp.reducer import Reducer
from miniddp.unused import UsedParameters

REFERENCE = project_root() / "book" / "reference"
TOUR = nbformat.read(REFERENCE / "tour_of_the_reducer.ipynb", as_version=4)
TO_PYTORCH = TOUR.cells[-1].source
IN_YOUR_SCRIPT = (REFERENCE / "use_it_in_your_script.md").read_text()
SYMPTOMS = (REFERENCE / "symptoms.md").read_text()
ROW = re.compile(r"^\| (`[^|]*) \| (`[^|]*|the constructor) \|", re.MULTILINE)
OURS = {"UsedParameters": UsedParameters, "buckets": buckets, "replicas": replicas}


def rows(heading: str) -> list[tuple[list[str], list[str]]]:
    section = TO_PYTORCH.split(f"### {heading}\n")[1].split("\n### ")[0]
    pairs = ROW.findall(section)  # the header's second cell begins with a word
    return [
        (re.findall(r"`([^`]+)`", ours), re.findall(r"`([^`]+)`", them)) for ours, them in pairs
    ]


def test_every_name_of_ours_in_the_tables_exists():
    found = 0
    for heading, cls in (("The wrapper", MiniDDP), ("The reducer", Reducer)):
        for ours, _ in rows(heading):
            for name in ours:
                owner, _, attribute = name.rpartition(".")
                owner = OURS[owner] if owner else (buckets if name == "arrival_plan" else cls)
                assert hasattr(owner, attribute or name), name
                found += 1
    assert found >= 20


def test_every_name_of_pytorchs_wrapper_in_the_table_exists():
    found = [name for _, theirs in rows("The wrapper") for name in theirs]
    assert len(found) >= 8
    assert [n for n in found if not hasattr(torchs.DistributedDataParallel, n)] == []
    assert hasattr(utils, "_verify_param_shape_across_processes")
    assert hasattr(torchs, "_DDPJoinHook")


def test_every_name_in_the_table_of_sharding_exists():
    found = rows("Fully sharded")
    assert len(found) >= 5
    for ours, theirs in found:
        for package, names in (
            ("miniddp.sharded", ours),
            ("torch.distributed.fsdp._fully_shard", theirs),
        ):
            for name in names:
                module, _, attribute = name.rpartition(".")
                assert hasattr(importlib.import_module(f"{package}.{module}"), attribute), name


def test_every_finding_on_the_page_of_symptoms_is_one_of_the_doctors():
    said = [
        *re.findall(r"^\|.*\|.*\|([^|]*)\|$", SYMPTOMS, re.MULTILINE),
        *re.findall(r"Doctor[^:\n]*: (.*)", SYMPTOMS),
    ]
    codes = re.findall(r"`(\w+)`", " ".join(said))
    assert len(codes) > 90
    assert [code for code in codes if code not in CATALOG] == []


def test_every_public_name_on_the_page_of_the_api_exists_and_has_a_docstring():
    names = re.findall(r"^```\{api\} (\S+)$", (REFERENCE / "api.md").read_text(), re.MULTILINE)
    assert len(names) >= 20
    assert [name for name in names if not named(name).__doc__] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_script_prints_the_norm_of_the_full_batch_on_every_rank(tmp_path: Path, ranks: int):
    script = next(
        code
        for code in re.findall(r"```python\n(.*?)```", IN_YOUR_SCRIPT, re.DOTALL)
        if "init_process_group" in code
    )
    assert len(script.splitlines()) <= 25
    (tmp_path / "script.py").write_text(script)
    options = [f"--nproc-per-node={ranks}", "script.py"]
    done = run_warm(options, 600, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    # A rank writes its text and its newline separately, so two ranks' texts may share a line.
    norms = re.findall(r"rank \d: gradient norm (\d+\.\d{4})", done.stdout)
    assert len(norms) == ranks, done.stderr

    alone = tmp_path / "alone.py"
    alone.write_text(
        script.replace('dist.init_process_group("gloo")\n', "")
        .replace("dist.get_rank(), dist.get_world_size()", "0, 1")
        .replace("MiniDDP(nn.Linear(8, 1))", "nn.Linear(8, 1)")
        .replace("dist.destroy_process_group()\n", "")
    )
    ended = run_in_process(str(alone))
    assert re.findall(r"gradient norm (\S+)", ended.stdout) == norms[:1]
    assert set(norms) == {norms[0]}


IN_A_FRAMEWORK = """
import accelerate
import pytorch_lightning.strategies.ddp as lightning

model = accelerate.Accelerator(cpu=True).prepare(torch.nn.Linear(2, 1))
used = {type(model), lightning.DistributedDataParallel}
print("used", {cls.__module__ for cls in used}, flush=True)
torch.distributed.destroy_process_group()
"""


def test_frameworks_use_the_class_that_the_page_puts_in_torch(tmp_path: Path):
    (lines,) = re.findall(
        r"```python\n(import torch\n[^`]*?\.DistributedDataParallel = [^`]*)```", IN_YOUR_SCRIPT
    )
    (tmp_path / "script.py").write_text(lines + IN_A_FRAMEWORK)
    done = run_warm(["--nproc-per-node=2", "script.py"], 600, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("used {'miniddp.torch_drop_in.wrapper'}") == 2, done.stdout
