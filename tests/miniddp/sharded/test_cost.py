"""What `fully_shard` sends and holds; labs/in_pieces.py counts the other ways."""

import gc
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.utils.checkpoint import checkpoint

from labkit.profiling.step_cost import ring_bytes, step_cost
from labkit.testing.watch import RecordedCollectives
from miniddp.sharded import fully_shard
from tests.on_ranks import on_ranks

SIZE = 4 * (24 * 12 + 24 * 24)  # bytes of the parameters, which 4 ranks share evenly


@on_ranks(4)
def test_one_group_is_kept_whole_until_backward_as_torch_keeps_it(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24, bias=False), nn.Linear(24, 24, bias=False))
    model = fully_shard(model)
    batch = torch.randn(5, 12, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.Adam(model.parameters())
    found = step_cost(model, optimizer, lambda model: model(batch).pow(2).mean())
    share = SIZE // 4
    assert 2 * (SIZE - share) <= found.sent <= 2 * (SIZE - share) + 64 * 4
    for held in (found.parameters, found.gradients, found.state - share):
        assert share <= held <= share + 64


class Pairs(nn.Module):
    """Pairs of layers, each a group of its own; `reentrant`: how pairs are checkpointed, if so."""

    def __init__(self, how: Any, reentrant: bool | None = None):
        super().__init__()
        layers = [nn.Linear(40, 40, bias=False) for _ in range(6)]
        self.pairs = nn.ModuleList(map(nn.Sequential, layers[::2], layers[1::2]))
        self.reentrant = reentrant
        for layer in layers:
            how(layer)
        how(self)

    def forward(self, x):
        for pair in self.pairs:
            if self.reentrant is None:
                x = pair(x)
            else:
                x = checkpoint(pair, x, use_reentrant=self.reentrant)
        return x


LAYER = 4 * 40 * 40
WAYS = ["once", "after a forward without a backward", "twice", "checkpointed", "reentrant"]


def cost_of_backward(rank: int, way: str, how: Any) -> tuple[int, float]:
    """Tensors of a layer's size and more when backward reaches the input; layers sent in a step."""
    model = Pairs(how, {"checkpointed": False, "reentrant": True}.get(way))
    found: list[int] = []

    def count(_gradient: Tensor) -> None:
        tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found.append(sum(size >= LAYER for size in sizes.values()))

    kept = []
    gc.collect()
    for _ in range(4):  # in the first step, nothing is prefetched in forward
        inputs = torch.randn(5, 40, requires_grad=True)
        inputs.register_hook(count)
        with RecordedCollectives() as recorded:
            if way == "after a forward without a backward":
                kept = [model(inputs)]
            # The backward of the second forward is over before that of the first one begins.
            first = model(inputs.detach()) if way == "twice" else 0
            (first + model(inputs)).pow(2).mean().backward()
        kept.clear()
    # The least: on a busy machine, a message may be there a moment longer.
    return min(found[1:]), 2 * ring_bytes(recorded.launched, 2) / LAYER


@on_ranks(2)
def test_backward_holds_and_sends_no_more_than_torchs(rank: int) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    for way in WAYS:
        held, sent = cost_of_backward(rank, way, fully_shard)
        torchs_held, torchs_sent = cost_of_backward(rank, way, torchs_fully_shard)
        assert held <= torchs_held, way
        # Gathers have a label. A rank cannot know that no rank has a gradient after the second
        # forward's backward; torch's does not reduce then.
        assert sent <= torchs_sent + 0.5 + (6 if way == "twice" else 0), way


@on_ranks(2)
def test_a_forward_without_a_backward_keeps_no_activations() -> None:
    model, outputs = Pairs(fully_shard), []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *call: outputs.append(weakref.ref(call[-1])))
    gc.disable()
    model(torch.randn(5, 40))
    gc.enable()
    assert [output() for output in outputs] == [None] * 6
