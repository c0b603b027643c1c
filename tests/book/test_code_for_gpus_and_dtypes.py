"""What the pages' code does with several dtypes, and where it puts the tensors that it sends."""

import ast
import re

import nbformat
import pytest
import torch
from exercise_cells import state_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.book.chapters import chapters_of
from labkit.launch import project_root, run_ranks

BOOK = project_root() / "book"
BUILD = BOOK / "build"
FACTORIES = {"tensor", "zeros", "ones", "full", "empty", "arange", "randn", "rand"}


def code_of(chapter):
    cells = nbformat.read(chapter, as_version=4).cells
    return [re.sub(r"^%.*$", "", c.source, flags=re.M) for c in cells if c.cell_type == "code"]


def definitions(file):
    """The source of every class and function of a page or module; of equal names, the first."""
    found = {}
    for cell in code_of(file) if file.suffix == ".ipynb" else [file.read_text()]:
        for node in ast.parse(cell).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.setdefault(node.name, ast.unparse(node))
    return found


def test_the_wrapper_begins_with_the_reducer_of_the_page_before_it():
    page_2 = definitions(BUILD / "buckets_that_overlap.ipynb")
    page_3 = definitions(BUILD / "the_wrapper.py")
    shared = ("pack", "Bucket", "Buckets", "Launching", "Reducer")
    assert {name: page_3[name] for name in shared} == {name: page_2[name] for name in shared}


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8)
        self.last = nn.Linear(8, 1, dtype=torch.bfloat16)

    def forward(self, x):
        return self.last(self.high(self.low(x.bfloat16()).float()).bfloat16())


def gradients_of_two_passes(rank, average, cap_bytes):
    torch.manual_seed(0)
    model, x = TwoDtypes(), torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    averager = average(model, cap_bytes)
    for _ in range(2):
        model.zero_grad()
        (averager if callable(averager) else model)(x).float().square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def torch_ddp(model, cap_bytes):
    return DistributedDataParallel(model, bucket_cap_mb=cap_bytes / 2**20)


@pytest.mark.parametrize("cap_bytes", [1, 200, 10_000])
def test_the_pages_reducer_averages_two_dtypes_as_torchs_ddp_does(cap_bytes):
    reducer = state_for(BUILD / "buckets_that_overlap.ipynb", "check_views", ["Reducer"])["Reducer"]
    ours = run_ranks(gradients_of_two_passes, 2, reducer, cap_bytes)
    theirs = run_ranks(gradients_of_two_passes, 2, torch_ddp, cap_bytes)
    for mine, ddps in zip(ours, theirs, strict=True):
        assert [g.dtype for g in mine] == [g.dtype for g in ddps]
        assert all(map(torch.equal, mine, ddps))


def new_on_the_cpu(function):
    """The names that get a new tensor without a device, and that a collective then takes."""
    made, sent = set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call, [target, *_] = node.value, node.targets
            of_torch = ast.unparse(call.func).partition("torch.")[2] in FACTORIES
            if of_torch and "device" not in {keyword.arg for keyword in call.keywords}:
                made.add(ast.unparse(target))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("dist."):
            sent |= {ast.unparse(argument) for argument in node.args}
    return made & sent


@pytest.mark.parametrize("chapter", chapters_of(BOOK), ids=lambda p: p.stem)
def test_a_new_tensor_that_is_sent_names_its_device(chapter):
    for cell in code_of(chapter):
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.FunctionDef):
                assert not new_on_the_cpu(node), f"{chapter.stem}, {node.name}"
