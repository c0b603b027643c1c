"""What the pages' code does with several dtypes, and where it puts the tensors that it sends."""

import ast
import itertools

import pytest
import torch
from exercise_cells import code_of, state_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.book.chapters import chapters_of
from labkit.launch import project_root, run_ranks

BOOK = project_root() / "book"
BUILD = BOOK / "build"
FACTORIES = {
    f"torch.{name}"
    for name in ("tensor", "zeros", "ones", "full", "empty", "arange", "randn", "rand")
}


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


def gradients_of_two_passes(rank, average):
    gradients = []
    for cap_bytes in (1, 200, 10_000):
        torch.manual_seed(0)
        model, x = TwoDtypes(), torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        averager = average(model, cap_bytes)
        for _ in range(2):
            model.zero_grad()
            (averager if callable(averager) else model)(x).float().square().sum().backward()
        gradients += [parameter.grad for parameter in model.parameters()]
    return gradients


def torch_ddp(model, cap_bytes):
    return DistributedDataParallel(model, bucket_cap_mb=cap_bytes / 2**20)


def test_the_pages_reducer_averages_two_dtypes_as_torchs_ddp_does():
    reducer = state_for(BUILD / "buckets_that_overlap.ipynb", "check_views", ["Reducer"])["Reducer"]
    ours = run_ranks(gradients_of_two_passes, 2, reducer)
    theirs = run_ranks(gradients_of_two_passes, 2, torch_ddp)
    for mine, ddps in zip(ours, theirs, strict=True):
        assert [g.dtype for g in mine] == [g.dtype for g in ddps]
        assert all(map(torch.equal, mine, ddps))


def on_the_cpu(node):
    """Whether this makes a tensor and names no device."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in FACTORIES:
        return False
    return "device" not in {keyword.arg for keyword in node.keywords}


def new_on_the_cpu(function):
    """What a collective takes, itself or in a sum or product, that was made without a device."""
    made, sent = set(), []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and on_the_cpu(node.value):
            made |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("dist."):
            terms = [(n.left, n.right) if isinstance(n, ast.BinOp) else (n,) for n in node.args]
            sent += itertools.chain.from_iterable(terms)
    return [ast.unparse(one) for one in sent if on_the_cpu(one) or ast.unparse(one) in made]


@pytest.mark.parametrize("chapter", chapters_of(BOOK), ids=lambda p: p.stem)
def test_a_new_tensor_that_is_sent_names_its_device(chapter):
    for cell in code_of(chapter):
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.FunctionDef):
                assert not new_on_the_cpu(node), f"{chapter.stem}, {node.name}"
