"""The drop-in's mixed precision where the order of calls, or a kind of parameter, is unusual."""

from types import SimpleNamespace

import torch
from torch import nn

from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.ddp_models import TwoHeads, rows
from tests.on_ranks import on_ranks


def precision(**dtypes: torch.dtype | None) -> SimpleNamespace:
    usual = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "buffer_dtype": None}
    return SimpleNamespace(**usual | dtypes)


def scalar() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((1, 1), float(value))


@on_ranks(2)
def test_a_second_forward_before_the_backward_loses_no_gradient(rank):
    ddp = DropIn(scalar(), mixed_precision=precision())
    (ddp(ones(1 + rank)) + ddp(ones(3 + rank))).sum().backward()
    assert ddp.module.weight.grad.item() == 5
    ddp.zero_grad()
    output = ddp(ones(1 + rank))
    with torch.no_grad():
        ddp(ones())
    output.sum().backward()
    assert ddp.module.weight.grad.item() == 1.5
    assert ddp.module.weight.dtype == torch.float32


@on_ranks(2)
def test_forwards_after_one_under_no_sync_lose_no_gradient_either(rank):
    # A norm saves its weight for the backward, which then needs it as narrow as the rest.
    for module in (scalar(), nn.Sequential(scalar(), nn.LayerNorm(1, bias=False))):
        ddp = DropIn(module, mixed_precision=precision())
        weight, plain = next(ddp.parameters()), isinstance(module, nn.Linear)
        with ddp.no_sync():
            first = ddp(ones(1 + rank))
        (first + ddp(ones(3 + rank))).sum().backward()
        assert weight.grad.item() == 5 or not plain
        ddp.zero_grad()
        with ddp.no_sync():
            alone = ddp(ones(1 + rank))
            with torch.no_grad():
                ddp(ones())
            alone.sum().backward()
        with torch.inference_mode():
            ddp(ones())
        ddp(ones(2)).sum().backward()
        assert weight.grad.item() == 3.5 or not plain
        assert {t.dtype for p in ddp.parameters() for t in (p, p.grad)} == {torch.float32}


@on_ranks(2)
def test_data_that_are_assigned_between_two_steps_are_kept(rank):
    for dtypes in (precision(), precision(param_dtype=None)):
        ddp = DropIn(scalar(), mixed_precision=dtypes)
        ddp(ones(rank)).sum().backward()
        nn.utils.vector_to_parameters(torch.tensor([4.0]), ddp.parameters())
        assert ddp(ones()).item() == 4


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.turn * torch.complex(x.float(), 2 * x.float())).real.sum()


@on_ranks(2)
def test_a_complex_gradient_keeps_its_imaginary_part(rank):
    for reduced in (None, torch.bfloat16):
        ddp = DropIn(Turn(), mixed_precision=precision(param_dtype=None, reduce_dtype=reduced))
        ddp(torch.tensor([1.0 + rank])).backward()
        # PyTorch's gradient of Re(z·c) is the conjugate of c: here of 1 + 2i and of 2 + 4i.
        assert ddp.module.turn.grad.item() == 1.5 - 3j


@on_ranks(2)
def test_a_sparse_gradient_is_averaged_and_wide(rank):
    torch.manual_seed(0)
    ddp = DropIn(nn.Embedding(4, 2, sparse=True), mixed_precision=precision())
    ddp(torch.tensor([rank, 3])).sum().backward()
    gradient = ddp.module.weight.grad.to_dense()
    assert gradient.dtype == torch.float32
    assert gradient.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]


@on_ranks(2)
def test_the_final_model_of_join_is_wide_after_a_forward_under_no_sync(rank):
    ddp = DropIn(scalar(), mixed_precision=precision())
    with ddp.join():
        for step in range(1 + rank):
            with ddp.no_sync() if step == 1 else torch.enable_grad():
                ddp(ones()).sum().backward()
    assert ddp.module.weight.dtype == torch.float32
    assert ddp.module.weight.item() == 1


@on_ranks(2)
def test_parameters_are_wide_after_skipped_buckets_and_without_gradients(rank):
    skipping = {"skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-6}
    options = {"find_unused_parameters": True, "mixed_precision": precision(), **skipping}
    ddp = DropIn(TwoHeads(), **options)
    ddp(rows(rank), "a").float().sum().backward()  # b's bucket, the first one, is skipped
    assert {parameter.dtype for parameter in ddp.parameters()} == {torch.float32}
    with torch.no_grad():
        ddp(rows(rank), "a")
    assert {tensor.dtype for tensor in ddp.state_dict().values()} == {torch.float32}


@on_ranks(2)
def test_the_average_is_over_the_ranks_that_join_asks_for(rank):
    full = TwoHeads()
    full(rows(0), "b").sum().backward()
    for initial, divisor in ((True, 2), (False, 1)):
        ddp = DropIn(TwoHeads(), find_unused_parameters=True, mixed_precision=precision())
        with ddp.join(divide_by_initial_world_size=initial):
            for _ in range(2 * (1 - rank)):
                ddp.zero_grad()
                ddp(rows(0), "b").float().sum().backward()
                expected = full.b.weight.grad / divisor
                torch.testing.assert_close(ddp.module.b.weight.grad, expected, rtol=3e-2, atol=3e-2)
