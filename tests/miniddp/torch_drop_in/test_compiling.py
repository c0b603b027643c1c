"""torch.compile around the wrapper: the module is compiled, the wrapper's own work is not."""

import copy
import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.on_ranks import on_ranks

LAYERS = 4  # of 1 MiB each: with caps of 1 MiB, one bucket a layer
STEPS = 3


class Stack(nn.Module):
    """A module of its own class: Dynamo does not enter one of torch.nn from the top."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512) for _ in range(LAYERS)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def batch(rank, step):
    return torch.randn(8, 512, generator=torch.Generator().manual_seed(10 * rank + step))


def train(model, rank):
    """The gradients of each step."""
    gradients = []
    for step in range(STEPS):
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    return gradients


def compiled(wrapper, rank, **settings):
    """Gradients, number of graphs and warnings of a compiled wrapper around the same module."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = wrapper(Stack(), bucket_cap_mb=1.0, **settings)
        gradients = train(torch.compile(model, backend=count), rank)
    return gradients, len(graphs), [str(warning.message) for warning in caught]


SETTINGS = ({}, {"find_unused_parameters": True}, {"static_graph": True})


def test_a_compiled_wrapper_splits_its_graph_by_the_buckets_and_reduces_as_torchs():
    def work(rank):
        both = (DropIn, DistributedDataParallel)
        return [[compiled(wrap, rank, **settings) for wrap in both] for settings in SETTINGS]

    for of_rank in run_ranks(work, 2, timeout=600):
        for (gradients, graphs, said), theirs in of_rank:
            assert set(said) <= set(theirs[2])
            assert graphs == theirs[1] == LAYERS
            for of_ours, of_theirs in zip(gradients, theirs[0], strict=True):
                assert all(map(torch.equal, of_ours, of_theirs))


@on_ranks(2)
def test_a_wrapper_inside_a_wrapper_gives_the_outer_one_back_to_dynamo():
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            seen.append(DistributedDataParallel._get_active_ddp_module())
            return super().forward(x)

    inner = DropIn(Spy(4, 4))
    outer = DropIn(nn.Sequential(inner, Spy(4, 4)))
    copy.deepcopy(outer)  # a copy is made outside of a forward
    outer(torch.ones(2, 4)).sum().backward()
    assert seen[0] is inner
    assert seen[1] is outer
    assert len(seen) == 2
