"""`average_gradients`: values of every kind of gradient. (Training: the ladder's first rungs.)"""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labkit.launch.ranks import run_ranks
from miniddp.manual import average_gradients
from tests.on_ranks import on_ranks


@on_ranks(3)
def test_the_sum_is_the_average_times_the_number_of_ranks(rank):
    for flat, (combine, expected) in product(
        (False, True), (("average", [2.0, 10.0]), ("sum", [6.0, 30.0]))
    ):
        module = nn.ParameterList([nn.Parameter(torch.zeros(2))])
        module[0].grad = torch.tensor([1.0 + rank, 10.0])
        average_gradients(module, combine=combine, flat=flat)
        assert module[0].grad.tolist() == expected


@settings(max_examples=6)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6),
    dtypes=st.lists(
        st.sampled_from(
            [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
        ),
        min_size=6,
        max_size=6,
    ),
    missing=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5))),
)
def test_any_shapes_dtypes_and_missing_gradients_average_alike_each_and_flat(
    shapes, dtypes, missing
):
    def value(rank: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * rank + index)
        return torch.randn(shapes[index], generator=generator).to(dtypes[index])

    def work(rank):
        found = []
        for flat in (False, True):
            module = nn.ParameterList(
                nn.Parameter(torch.zeros(s).to(d)) for s, d in zip(shapes, dtypes, strict=False)
            )
            for index, parameter in enumerate(module):
                if (rank, index) not in missing:
                    parameter.grad = value(rank, index)
            average_gradients(module, flat=flat)
            found.append([p.grad for p in module])
        return found

    for found in run_ranks(work, 3):
        for grads in found:
            for index, gradient in enumerate(grads):
                ranks = [r for r in range(3) if (r, index) not in missing]
                if not ranks:
                    assert gradient is None
                    continue
                wanted = sum(value(r, index).to(torch.complex128) for r in ranks) / 3
                assert gradient.dtype == dtypes[index]
                tolerance = {torch.bfloat16: 0.05, torch.float16: 5e-3}.get(dtypes[index], 1e-6)
                assert torch.allclose(gradient.to(torch.complex128), wanted, atol=tolerance)


@on_ranks(4)
def test_half_precision_sums_do_not_overflow_on_the_way_to_their_average(rank):
    for flat in (False, True):
        module = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.float16))])
        module[0].grad = torch.full((3,), 30000.0 + 100 * rank, dtype=torch.float16)
        average_gradients(module, flat=flat)
        assert torch.allclose(module[0].grad.float(), torch.tensor(30150.0), atol=50)


@on_ranks(2)
def test_sparse_and_expanded_gradients_become_dense_averages(rank):
    for flat in (False, True):
        table = nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([rank])).sum().backward()
        bias = nn.Parameter(torch.zeros(3))
        bias.grad = torch.tensor(float(rank)).expand(3)
        average_gradients(nn.ModuleDict({"t": table, "b": nn.ParameterList([bias])}), flat=flat)
        assert table.weight.grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]
        assert bias.grad.tolist() == [0.5] * 3


@on_ranks(2)
def test_a_module_without_trainable_parameters_is_left_alone_and_another_way_is_refused():
    assert average_gradients(nn.Tanh()) is None
    with pytest.raises(ValueError, match='combine must be "average" or "sum", got \'mean\''):
        average_gradients(nn.Linear(2, 2), combine="mean")
