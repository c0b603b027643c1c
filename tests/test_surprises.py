"""Every surprise that the book promises has an executed cell that prints ratio and cosine."""

import copy
import re
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from labkit.book.chapters import chapters_of
from labkit.launch import RanksTimeoutError, run_ranks
from labkit.launch.scripts import project_root

BOOK = project_root() / "book"

# Item → what its table has to show: verdicts, or names of variants where there is no verdict.
STEP = {
    "clip-before-sync": {"direction bug", "right"},
    "clip-under-accumulation": {"direction bug", "right"},
    "zero-grad-placement": {"direction bug", "scale bug", "right"},
    "gradscaler-inf-on-one-rank": {"not finite", "right"},
    "gradscaler-different-scales": {"direction bug", "right"},
    "no-sync-placement": {"direction bug", "right"},
    "two-backwards-one-forward": {"direction bug", "right"},
    "wrapper-not-kept": {"direction bug", "right"},
    "expected-to-have-finished-reduction": {"Expected to have finished reduction", "right.weight"},
    "schedulers-step-w-times": {"direction bug", "right"},
    "floating-point-order": {"right", "no"},
    "half-precision-range": {"not finite", "zero", "direction bug", "right"},
    "parameters-averaged": {"direction bug", "right"},
    "hooks-see-local-gradients": {"direction bug", "right"},
    "reentrant-checkpoint-twice": {"direction bug", "right"},
    "static-graph-with-no-sync": {"INTERNAL ASSERT FAILED", "right"},
}
DATA = {
    "batchnorm": {"direction bug"},
    "sync-batchnorm": {"right"},
    "sampler-padding-in-evaluation": {"direction bug", "right"},
    "set-epoch": {"without set_epoch", "with set_epoch"},
    "same-seed-same-dropout": {"one seed", "seed + rank"},
    "uneven-inputs": {"scale bug", "direction bug", "right"},
    "last-rank-logging": {"right", "last rank's"},
}
LOSS = {
    "gather-gradient": {"scale bug", "right"},
    "clip-times-w": {"direction bug", "scale bug", "right"},
    "clip-temperature": {"direction bug", "scale bug", "right"},
    "local-loss": {"direction bug", "scale bug", "right", "best factor"},
    "all-reduce-in-the-loss": {"scale bug", "direction bug", "right"},
    "non-linear-loss": {"direction bug", "scale bug", "right"},
    "times-w-in-detection": {"direction bug", "scale bug", "right"},
    "bypassing-module": {"direction bug", "right"},
}
CHAPTERS = {
    "surprises/in_the_step.ipynb": STEP,
    "surprises/in_the_data.ipynb": DATA,
    "surprises/in_the_loss.ipynb": LOSS,
}
# Executed cells without a gradient of their own.
MUSEUM = {
    "museum-catalog": set(),
    "museum-loss-curves": {"one process"},
    "museum-matrix": {"ratio", "cosine"},
    "museum-error": {"likely cause"},
    "museum-own-test": {"no invariant is violated"},
    "museum-judges-tests": {"loss_falls"},
}


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(BOOK / name, as_version=4)


def cells_of(notebook: nbformat.NotebookNode) -> dict[str, tuple[int, nbformat.NotebookNode]]:
    """Item → the cell that carries it, and its place."""
    found = {}
    for place, cell in enumerate(notebook.cells):
        for item in cell.metadata.get("miniddp_item", []):
            assert item not in found, f"two cells are tagged {item}"
            found[item] = place, cell
    return found


def text_of(cell: nbformat.NotebookNode) -> str:
    return "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    )


def check(notebook: nbformat.NotebookNode, item: str, shows: set[str], figures: bool) -> None:
    """`item` has a cell that was run to its end and prints what it is to show."""
    cells = cells_of(notebook)
    assert item in cells, f"no cell of this chapter is about {item}"
    place, cell = cells[item]
    assert cell.cell_type == "code"
    assert cell.execution_count is not None, f"the cell about {item} was never run"
    assert cell.outputs, f"the cell about {item} has no output"
    assert all(output.output_type != "error" for output in cell.outputs), item
    printed = text_of(cell)
    wanted = shows | ({"ratio", "cosine"} if figures else set())
    for what in wanted:
        assert what in printed, f"the cell about {item} does not print: {what}"
    before = "\n".join(c.source for c in notebook.cells[:place] if c.cell_type == "markdown")
    section = before[before.rindex("\n## ") :]
    label = before[: before.rindex("\n## ")].rstrip().splitlines()[-1]
    assert re.fullmatch(r"\(\S+\)=", label), f"the section of {item} has no label: {label}"
    if figures:
        after = next(c.source for c in notebook.cells[place + 1 :] if c.cell_type == "markdown")
        assert re.search(r'^> [*"]', section, re.M) or "gather" in item, item
        assert "**Why.**" in after or "**Under which" in after or item in NO_WHY, item


# Explained in the sentences around them.
NO_WHY = {"clip-temperature", "gather-gradient"}


@pytest.mark.parametrize(
    ("chapter", "item"), [(name, item) for name, items in CHAPTERS.items() for item in items]
)
def test_every_surprise_has_an_executed_cell_with_ratio_and_cosine(chapter, item):
    check(read(chapter), item, CHAPTERS[chapter][item], figures=True)


@pytest.mark.parametrize("item", MUSEUM)
def test_every_part_of_the_museum_chapter_is_executed(item):
    check(read("surprises/museum.ipynb"), item, MUSEUM[item], figures=False)


@pytest.mark.parametrize("chapter", chapters_of(BOOK), ids=lambda path: path.stem)
def test_no_cell_is_tagged_with_an_item_that_nobody_lists(chapter: Path):
    listed = {**STEP, **DATA, **LOSS, **MUSEUM}
    assert set(cells_of(read(chapter.relative_to(BOOK).as_posix()))) <= set(listed)


def without(notebook: nbformat.NotebookNode, what: str) -> nbformat.NotebookNode:
    notebook = copy.deepcopy(notebook)
    _, cell = cells_of(notebook)["clip-before-sync"]
    if what == "the cell":
        notebook.cells.remove(cell)
    elif what == "its output":
        cell.outputs = []
    elif what == "its count":
        cell.execution_count = None
    elif what == "the cosine":
        cell.outputs[0].text = cell.outputs[0].text.replace("cosine", "")
    elif what == "the wrong recipe":
        lines = cell.outputs[0].text.splitlines()
        cell.outputs[0].text = "\n".join(line for line in lines if "direction bug" not in line)
    elif what == "an exception":
        cell.outputs.append(nbformat.v4.new_output("error", ename="E", evalue="", traceback=[]))
    return notebook


@pytest.mark.parametrize(
    "what",
    ["the cell", "its output", "its count", "the cosine", "the wrong recipe", "an exception"],
)
def test_a_chapter_that_lacks_one_of_them_is_refused(what):
    chapter = read("surprises/in_the_step.ipynb")
    check(chapter, "clip-before-sync", STEP["clip-before-sync"], figures=True)
    with pytest.raises(AssertionError):
        check(without(chapter, what), "clip-before-sync", STEP["clip-before-sync"], figures=True)


# Statements of these chapters that no cell of theirs shows.


def _not_kept(rank: int, keyword: str) -> str:
    outputs = DistributedDataParallel(nn.Linear(3, 1), **{keyword: True})(torch.ones(2, 3) * rank)
    with pytest.raises(AttributeError) as raised:
        outputs.sum().backward()
    return str(raised.value)


@pytest.mark.parametrize("keyword", ["find_unused_parameters", "static_graph"])
def test_a_wrapper_that_was_not_kept_raises_with_these_keywords(keyword):
    assert all("reducer" in said for said in run_ranks(_not_kept, 2, keyword))


class _SharedInTheMiddle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)


def _in_the_middle(rank: int) -> str:
    ddp = DistributedDataParallel(_SharedInTheMiddle())
    with pytest.raises(RuntimeError) as raised:
        ddp(torch.ones(4, 6) + rank).sum().backward()
    return str(raised.value)


def test_a_reentrant_layer_used_twice_is_noticed_in_the_middle_of_a_network():
    assert all("ready only once" in said for said in run_ranks(_in_the_middle, 2))


def _after_join(rank: int, momentum: float) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(2, 1)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum)
    random = torch.Generator().manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(4, 2, generator=random)).square().sum().backward()
        optimizer.step()

    with Join([ddp]):
        for _ in range(4 if rank == 0 else 2):
            step()
    joined = module.weight.detach().clone()
    step()
    return joined, module.weight.detach()


@pytest.mark.parametrize(("momentum", "diverge"), [(0.0, False), (0.9, True)])
def test_after_join_the_weights_agree_but_momentum_makes_replicas_diverge(momentum, diverge):
    (joined_0, next_0), (joined_1, next_1) = run_ranks(_after_join, 2, momentum)
    assert torch.equal(joined_0, joined_1)
    assert torch.equal(next_0, next_1) != diverge


def _headroom(world_size: int) -> float:
    largest = torch.full((1,), torch.finfo(torch.float16).max, dtype=torch.float16) / world_size
    dist.all_reduce(largest)
    return largest.item()


def test_dividing_before_a_sum_in_float16_needs_headroom():
    """65,504 / 3 rounds up in float16, and three of these overflow; halves are exact."""
    assert run_ranks(_headroom, 2) == [65504.0] * 2
    assert run_ranks(_headroom, 3) == [float("inf")] * 3


def test_a_long_sum_in_bfloat16_stops_growing():
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1024):
        total += torch.tensor(1 / 1024, dtype=torch.bfloat16)
    assert total.item() == 0.25


def _rank_0_evaluates(rank: int, buffers: bool, unwrapped: bool) -> bool:
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8)] if buffers else [nn.Linear(6, 8)]
    ddp = DistributedDataParallel(nn.Sequential(*layers)).eval()
    if rank == 0:
        with torch.no_grad():
            (ddp.module if unwrapped else ddp)(torch.ones(2, 6))
    dist.barrier()
    return True


@pytest.mark.parametrize(("buffers", "unwrapped"), [(True, True), (False, False)])
def test_rank_0_may_evaluate_alone_on_the_module_or_without_buffers(buffers, unwrapped):
    assert run_ranks(_rank_0_evaluates, 2, buffers, unwrapped) == [True, True]


def test_a_wrapper_with_buffers_called_on_rank_0_alone_does_not_end():
    with pytest.raises(RanksTimeoutError):
        run_ranks(_rank_0_evaluates, 2, True, False, timeout=5, device="cpu")


def _rank_0_evaluates_between_steps(rank: int, with_grad: bool) -> torch.Tensor:
    """Two training steps, an evaluation on rank 0 alone, two more steps: the last gradient."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))
    inputs = torch.randn(4, 6) + rank

    def two_steps() -> None:
        ddp.train()
        for _ in range(2):
            ddp.zero_grad()
            ddp(inputs).exp().sum().backward()

    two_steps()
    if rank == 0:
        ddp.eval()
        with torch.set_grad_enabled(with_grad):
            for _ in range(3):
                ddp(inputs)
    two_steps()
    return ddp.module[0].weight.grad


def test_without_a_barrier_rank_0s_evaluation_is_paired_with_the_others_next_forward():
    rank_0, rank_1 = run_ranks(_rank_0_evaluates_between_steps, 2, False)
    assert torch.equal(rank_0, rank_1)
    assert rank_0.abs().max() > 1e-3


def test_without_no_grad_every_forward_of_an_evaluation_broadcasts_and_the_job_hangs():
    with pytest.raises(RanksTimeoutError):
        run_ranks(_rank_0_evaluates_between_steps, 2, True, timeout=5, device="cpu")
