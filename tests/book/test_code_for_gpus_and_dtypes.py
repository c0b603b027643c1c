"""What the pages' code does with several dtypes, and where it puts the tensors that it sends."""

import ast
import re

import nbformat
import pytest
import torch
import torch.distributed as dist
from exercise_cells import state_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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


class OnAnotherDevice(TorchFunctionMode):
    """As if everything that exists were on a GPU: what is made here, or only from that, is not.

    Unless a device was named. Collectives then refuse it, as NCCL refuses a tensor on the CPU.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.backward:  # its hooks make tensors, too
            with self:
                return torch.autograd.Variable._execution_engine.run_backward(
                    args, (torch.ones_like(args[0]),), False, False, (), True, accumulate_grad=True
                )
        result = function(*args, **kwargs)
        named = any(isinstance(leaf, torch.device) for leaf in tree_leaves((args, kwargs)))
        left = not named and all(one.left_on_the_cpu for one in tensors_in((args, kwargs)))
        for tensor in tensors_in(result):
            tensor.left_on_the_cpu = left
        return result


def refusing(collective):
    def run(*args, **kwargs):
        sent = tensors_in((args, kwargs))
        assert not any(tensor.left_on_the_cpu for tensor in sent), "a tensor on the CPU is sent"
        return collective(*args, **kwargs)

    return run


def tensors_in(tree):
    found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    for tensor in found:
        tensor.left_on_the_cpu = getattr(tensor, "left_on_the_cpu", False)
    return found


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skip):
        x = self.always(x)
        return x if skip else self.rare(x)


def two_passes(rank, world_size, average, after_backward, skip):
    torch.manual_seed(0)
    model, x = TwoLayers(), torch.ones(2, 4) + rank
    for name in ("all_reduce", "broadcast", "all_gather"):
        setattr(dist, name, refusing(getattr(dist, name)))
    with OnAnotherDevice():
        averager = model if after_backward else average(model)
        for _ in range(2):
            model.zero_grad()
            call = averager if callable(averager) else model
            call(x, skip and rank == 1).square().sum().backward()
            if after_backward:
                average(model)
    return [parameter.grad for parameter in model.parameters()]


SENDING = {  # chapter, check, what averages, whether after backward, whether rank 1 skips a layer
    "flags": ("average_by_hand", "check_none", "average_with_flags", True, True),
    "one message": ("average_by_hand", "check_none", "average_gradients", True, True),
    "reducer": ("buckets_that_overlap", "check_views", "Reducer", False, False),
    "wrapper": ("the_wrapper", "check_plan", "DDP", False, False),
    "unused": ("the_wrapper", "check_plan", "lambda module: DDP(module, True)", False, True),
}


@pytest.mark.parametrize("case", SENDING)
def test_the_pages_code_sends_only_what_is_on_the_models_device(case, monkeypatch):
    chapter, check, average, *how = SENDING[case]
    monkeypatch.chdir(BUILD)
    state = state_for(BUILD / f"{chapter}.ipynb", check, [average])
    first, second = run_ranks(two_passes, 2, eval(average, state), *how)
    assert all(map(torch.equal, first, second))


def test_a_new_tensor_without_a_device_is_refused():
    def without_a_device(model):
        used = torch.tensor([float(p.grad is not None) for p in model.parameters()])
        dist.all_reduce(used / 2)

    with pytest.raises(AssertionError, match="a tensor on the CPU is sent"):
        run_ranks(two_passes, 2, without_a_device, True, False)
