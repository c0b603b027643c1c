"""What the pages' code does with several dtypes, and where it puts the tensors that it sends."""

import ast
import re
from contextlib import nullcontext
from typing import NamedTuple

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
COLLECTIVES = (
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "reduce_scatter_single",
)
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


def refuse_what_is_left_on_the_cpu():
    for name in COLLECTIVES:
        setattr(dist, name, refusing(getattr(dist, name)))


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
    refuse_what_is_left_on_the_cpu()
    with OnAnotherDevice():
        averager = model if after_backward else average(model)
        for _ in range(2):
            model.zero_grad()
            call = averager if callable(averager) else model
            call(x, skip and rank == 1).square().sum().backward()
            if after_backward:
                average(model)
    return [parameter.grad for parameter in model.parameters()]


# chapter, check, what averages, whether after backward, whether rank 1 skips a layer
SENDING = {
    "flags": ("build/average_by_hand", "check_none", "average_with_flags", True, True),
    "one message": ("build/average_by_hand", "check_none", "average_gradients", True, True),
    "reducer": ("build/buckets_that_overlap", "check_views", "Reducer", False, False),
    "wrapper": ("build/the_wrapper", "check_plan", "DDP", False, False),
    "unused": ("build/the_wrapper", "check_plan", "lambda module: DDP(module, True)", False, True),
    "five lines": (
        "start/what_is_averaged",
        "check_drift",
        "average_in_five_lines",
        True,
        False,
    ),
    "posted": ("puzzles/by_hand_or_ddp", "check_start", "average_gradients", True, False),
}


def state_of(chapter, check, name, monkeypatch):
    monkeypatch.chdir((BOOK / chapter).parent)
    return state_for(BOOK / f"{chapter}.ipynb", check, [name], calls_it=False)


@pytest.mark.parametrize("case", SENDING)
def test_the_pages_code_sends_only_what_is_on_the_models_device(case, monkeypatch):
    chapter, check, average, *how = SENDING[case]
    state = state_of(chapter, check, average, monkeypatch)
    of_ranks = run_ranks(two_passes, 2, eval(average, state), *how)
    assert all(map(torch.equal, *of_ranks))


class Scores(nn.Linear):
    """Called as the models of several pages are; a fixed number of samples has one loss."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, inputs, tokens=None):
        return super().forward(inputs)

    def no_sync(self):
        return nullcontext()


class Batch(NamedTuple):
    pixels: torch.Tensor
    tokens: None
    targets: torch.Tensor


class SumOfScores:
    count = staticmethod(len)

    def total(self, model, inputs):
        return model(inputs).sum()


def one_step(found, model, x):
    found(model, [Batch(x[:, None], None, x[:, :1].long() % 4)] * 2)


def right_step(found, model, x):
    found(model, [x, x], SumOfScores())


def train_locally(found, model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found(model, optimizer, [(x, x[:, 0].long() % 4)] * 2, every=1)


def in_pieces(found, model, x):
    pieces = found(model)
    pieces.gather()
    model(x).sum().backward()
    pieces.reduce()


def of_a_tensor(found, model, x):
    found(model(x)).sum().backward()


def on_another_device(rank, use, found):
    model, x = Scores(), torch.ones(2, 4) + rank
    refuse_what_is_left_on_the_cpu()
    with OnAnotherDevice():
        use(found, model, x)


COPIED = {  # what a page defines, and how to use it: chapter, check, use
    "one_step": ("puzzles/mean_of_means", "check_step", one_step),
    "right_step": ("surprises/which_mean", "check_truncated", right_step),
    "train_locally": ("scale/less_often", "check_outer", train_locally),
    "TwoMessages": ("scale/in_pieces", "check_norm", in_pieces),
    "gather_with_own_slice": ("surprises/in_the_loss", "check_barlow_twins", of_a_tensor),
    "plain_all_reduce": ("surprises/in_the_loss", "check_barlow_twins", of_a_tensor),
}


@pytest.mark.parametrize("name", COPIED)
def test_what_other_pages_send_is_on_the_models_device(name, monkeypatch):
    chapter, check, use = COPIED[name]
    found = state_of(chapter, check, name, monkeypatch)[name]
    run_ranks(on_another_device, 2, use, found)


def test_a_new_tensor_without_a_device_is_refused():
    def without_a_device(model):
        used = torch.tensor([float(p.grad is not None) for p in model.parameters()])
        dist.all_reduce(used / 2)

    with pytest.raises(AssertionError, match="a tensor on the CPU is sent"):
        run_ranks(two_passes, 2, without_a_device, True, False)
