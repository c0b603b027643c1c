"""The drop-in's mixed precision where the order of calls, or a kind of parameter, is unusual."""

from types import SimpleNamespace

import torch
from torch import nn

from labkit.launch.ranks import run_ranks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn


def precision(**dtypes: torch.dtype | None) -> SimpleNamespace:
    usual = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "buffer_dtype": None}
    return SimpleNamespace(**usual | dtypes)


def scalar() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((1, 1), float(value))


def two_forwards(rank):
    ddp = DropIn(scalar(), mixed_precision=precision())
    (ddp(ones(1 + rank)) + ddp(ones(3 + rank))).sum().backward()
    together = ddp.module.weight.grad.item()
    ddp.zero_grad()
    output = ddp(ones(1 + rank))
    with torch.no_grad():
        ddp(ones())
    output.sum().backward()
    return together, ddp.module.weight.grad.item(), ddp.module.weight.dtype


def test_a_second_forward_before_the_backward_loses_no_gradient():
    assert run_ranks(two_forwards, 2) == [(5.0, 1.5, torch.float32)] * 2


def after_no_sync(rank, module):
    ddp = DropIn(module, mixed_precision=precision())
    weight = next(ddp.parameters())
    with ddp.no_sync():
        first = ddp(ones(1 + rank))
    (first + ddp(ones(3 + rank))).sum().backward()
    together = weight.grad.item()
    ddp.zero_grad()
    with ddp.no_sync():
        alone = ddp(ones(1 + rank))
        with torch.no_grad():
            ddp(ones())
        alone.sum().backward()
    with torch.inference_mode():
        ddp(ones())
    ddp(ones(2)).sum().backward()
    dtypes = {each.dtype for p in ddp.parameters() for each in (p, p.grad)}
    return together, weight.grad.item(), dtypes


def test_forwards_after_one_under_no_sync_lose_no_gradient_either():
    assert run_ranks(after_no_sync, 2, scalar()) == [(5.0, 3.5, {torch.float32})] * 2
    # A norm saves its weight for the backward, which then needs it as narrow as the rest.
    with_norm = nn.Sequential(scalar(), nn.LayerNorm(1, bias=False))
    for *_, dtypes in run_ranks(after_no_sync, 2, with_norm):
        assert dtypes == {torch.float32}


def with_new_data(rank):
    outputs = []
    for dtypes in (precision(), precision(param_dtype=None)):
        ddp = DropIn(scalar(), mixed_precision=dtypes)
        ddp(ones(rank)).sum().backward()
        nn.utils.vector_to_parameters(torch.tensor([4.0]), ddp.parameters())
        outputs.append(ddp(ones()).item())
    return outputs


def test_data_that_are_assigned_between_two_steps_are_kept():
    assert run_ranks(with_new_data, 2) == [[4.0, 4.0]] * 2


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.turn * torch.complex(x.float(), 2 * x.float())).real.sum()


def turned(rank):
    gradients = []
    for reduced in (None, torch.bfloat16):
        ddp = DropIn(Turn(), mixed_precision=precision(param_dtype=None, reduce_dtype=reduced))
        ddp(torch.tensor([1.0 + rank])).backward()
        gradients.append(ddp.module.turn.grad.item())
    return gradients


def test_a_complex_gradient_keeps_its_imaginary_part():
    # PyTorch's gradient of Re(z·c) is the conjugate of c: here of 1 + 2i and of 2 + 4i.
    assert run_ranks(turned, 2) == [[1.5 - 3j] * 2] * 2


def words(rank):
    torch.manual_seed(0)
    ddp = DropIn(nn.Embedding(4, 2, sparse=True), mixed_precision=precision())
    ddp(torch.tensor([rank, 3])).sum().backward()
    return ddp.module.weight.grad.to_dense()


def test_a_sparse_gradient_is_averaged_and_wide():
    right = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0]])
    for gradient in run_ranks(words, 2):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, right)


def joined_after_no_sync(rank):
    ddp = DropIn(scalar(), mixed_precision=precision())
    with ddp.join():
        for step in range(1 + rank):
            with ddp.no_sync() if step == 1 else torch.enable_grad():
                ddp(ones()).sum().backward()
    return ddp.module.weight.dtype, ddp.module.weight.item()


def test_the_final_model_of_join_is_wide_after_a_forward_under_no_sync():
    assert run_ranks(joined_after_no_sync, 2) == [(torch.float32, 1.0)] * 2
