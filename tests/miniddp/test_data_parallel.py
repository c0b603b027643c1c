"""DataParallel on CPUs, held against the full batch in one module.

torch's own DataParallel is no oracle here, for without a GPU it runs the plain module; what it does
with buffers, scalars and nests is asked for one by one.
"""

import copy
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from miniddp.data_parallel import (
    MiniDataParallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from tests.ddp_models import MODELS, dense_gradients


class Pair(NamedTuple):
    left: Any
    right: Any


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(12, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(1))[0].squeeze(1)


NAMES = ["mlp", "tied weights", "a parameter used twice", "frozen parameters"]
NAMES += ["convolution", "dense embedding", "complex"]
BUILD: dict[str, Callable[[], nn.Module]] = {
    **{name: MODELS[name].build for name in NAMES},
    "gru": LastState,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(12, 3)),
}


@pytest.mark.parametrize("name", BUILD)
def test_output_and_gradients_are_those_of_the_full_batch(name: str) -> None:
    for batch, devices in product([1, 5, 8], [1, 2, 3, 7]):
        found = []
        for wrap in (nn.Sequential, partial(MiniDataParallel, devices=["cpu"] * devices)):
            torch.manual_seed(5)
            module = BUILD[name]()
            x = MODELS.get(name, MODELS["mlp"]).batch(batch)
            x.requires_grad_(x.is_floating_point())
            out = wrap(module)(x)
            (out.pow(2) * torch.linspace(1, 2, batch).unsqueeze(1)).mean().backward()
            found.append([out, x.grad, *dense_gradients(module)])
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@given(size=st.integers(0, 20), devices=st.integers(1, 6), dim=st.integers(0, 1))
def test_chunks_are_those_of_torch_chunk_and_gather_undoes_scatter(
    size: int, devices: int, dim: int
) -> None:
    shape = (size, 3) if dim == 0 else (3, size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(size), requires_grad=True)
    chunks = scatter(x, ["cpu"] * devices, dim)
    wanted = x.chunk(devices, dim)
    assert len(chunks) == len(wanted)
    assert all(torch.equal(c, w) for c, w in zip(chunks, wanted, strict=True))
    together = gather(chunks, "cpu", dim)
    assert torch.equal(together, x)
    weights = torch.arange(x.numel(), dtype=torch.float32).view(shape)
    (together * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_nests_are_cut_to_the_bottom_and_everything_else_goes_to_each_replica() -> None:
    x, marker = torch.arange(5), object()
    named = defaultdict(list, {"x": x, "deep": {"y": [x + 10, "text"]}})
    shares = scatter((Pair(x, marker), named, 3, None, [], {}), ["cpu"] * 4)
    assert len(shares) == 3  # chunks of 2, 2 and 1: the fourth device has nothing to do
    for share, chunk in zip(shares, x.chunk(4), strict=True):
        pair, cut, *others = share
        assert (type(share), type(pair), type(cut)) == (tuple, Pair, defaultdict)
        assert torch.equal(pair.left, chunk)
        assert pair.right is marker
        assert cut["missing"] == []
        assert torch.equal(cut["deep"]["y"][0], chunk + 10)
        assert (cut["deep"]["y"][1], *others) == ("text", 3, None, [], {})
    assert set(named) == {"x", "deep"}
    assert torch.equal(named["x"], x)


def test_nests_are_gathered_as_they_were_built() -> None:
    nest = OrderedDict(a=torch.arange(4.0).view(4, 1), b=[Pair(torch.ones(4), None)])
    found = gather(scatter(nest, ["cpu"] * 2), "cpu")
    (pair,) = found["b"]
    assert (type(found), type(pair)) == (OrderedDict, Pair)
    assert torch.equal(found["a"], nest["a"])
    assert pair.left.tolist() == [1.0] * 4
    assert pair.right is None


def test_along_another_dim_inputs_are_cut_and_outputs_put_together() -> None:
    seen = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(tuple(x.shape))
            return x * 2

    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(MiniDataParallel(Look(), ["cpu"] * 2, dim=1)(x), x * 2)
    assert sorted(seen) == [(3, 2), (3, 3)]


def test_scalars_are_gathered_into_a_vector_with_a_warning() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x).mean()

    module = Loss()
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 50.0])
    with pytest.warns(UserWarning, match="each replica returned a scalar"):
        losses = MiniDataParallel(module, ["cpu"] * 4)(x)
    assert losses.tolist() == [1.5, 3.5, 50.0]
    losses.mean().backward()  # 55/3, and not 60/5: the mean of means that the warning speaks of
    assert module.w.grad.item() == pytest.approx(55 / 3)
    with pytest.warns(UserWarning, match="vector of 1"):
        assert MiniDataParallel(Loss(), ["cpu"] * 4)(x[:1]).shape == (1,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MiniDataParallel(Loss(), ["cpu"])(x).shape == ()


def test_only_the_first_replica_updates_the_modules_buffers() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    torch.manual_seed(0)
    module = model()
    first_chunk_only = copy.deepcopy(module)
    x = torch.randn(9, 4)
    MiniDataParallel(module, ["cpu"] * 3)(x)
    first_chunk_only(x[:3])
    for name, buffer in first_chunk_only.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name
    assert module[1].num_batches_tracked == 1


def test_chunks_replicas_and_outputs_go_to_the_devices_that_are_named() -> None:
    devices = ["cpu", "meta"]  # the one other device that every machine has
    chunks = scatter(torch.ones(4), devices)
    assert [c.device.type for c in chunks] == devices
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for replica, device in zip(replicate(module, devices), devices, strict=True):
        assert {t.device.type for t in (replica[0].weight, replica[1].running_mean)} == {device}
    assert gather([torch.ones(2), torch.ones(2)], "meta").device.type == "meta"
    with pytest.warns(UserWarning, match="scalar"):
        assert gather([torch.tensor(1.0)] * 2, "meta").device.type == "meta"
    out = MiniDataParallel(module, ["cpu"] * 2, output_device="meta")(torch.ones(4, 2))
    assert out.device.type == "meta"
    misplaced = MiniDataParallel(nn.Sequential(nn.Linear(2, 2).to("meta")), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r'^0\.weight is on meta.* call module\.to\("cpu"\)'):
        misplaced(torch.ones(4, 2))


class Modes(nn.Module):
    """Returns one row that tells in which modes its thread ran."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ x.t(), torch.tensor(
            [[torch.is_grad_enabled(), torch.is_inference_mode_enabled()]]
        )


def test_threads_take_over_grad_mode_inference_mode_and_autocast() -> None:
    parallel = MiniDataParallel(Modes(), ["cpu"] * 2)
    x = torch.ones(2, 3)
    assert parallel(x)[1].tolist() == [[True, False]] * 2
    with torch.no_grad():
        assert parallel(x)[1].tolist() == [[False, False]] * 2
        assert parallel(x)[0].dtype == torch.float32
    with torch.inference_mode():
        assert parallel(x)[1].tolist() == [[False, True]] * 2
    with torch.autocast("cpu", dtype=torch.float16):
        assert parallel(x)[0].dtype == torch.float16
        with torch.autocast("cpu", enabled=False):
            assert parallel(x)[0].dtype == torch.float32
    with torch.no_grad():
        out = MiniDataParallel(nn.Linear(3, 1), ["cpu"] * 2)(x)
    assert not out.requires_grad


def test_replicas_run_at_the_same_time() -> None:
    all_here = threading.Barrier(3)

    def wait(x: Tensor) -> int:
        all_here.wait(timeout=100)  # raises unless all three are inside at once
        return threading.get_ident()

    shares = [((torch.ones(1),), {})] * 3
    assert len(set(parallel_apply([wait] * 3, shares, ["cpu"] * 3))) == 3


def test_an_exception_keeps_its_type_and_names_the_replica() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 5:
                raise KeyError("too much")
            return x

    with pytest.raises(KeyError, match="too much") as caught:
        MiniDataParallel(Picky(), ["cpu"] * 4)(torch.tensor([0.0, 0.0, 9.0, 9.0]))
    assert caught.value.__notes__ == ["raised in replica 2 of 4, on cpu"]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: MiniDataParallel(nn.Identity(), []), ValueError, "no devices: name at least one"),
        (lambda: scatter(torch.tensor(1.0), ["cpu"]), ValueError, "0-d tensor cannot be cut"),
        (
            lambda: scatter((torch.ones(8), torch.ones(2, 3)), ["cpu"] * 4),
            ValueError,
            r"\(2, 3\) makes 2, \(8,\) makes 4. Give all of them the same batch size",
        ),
        (lambda: gather(["a", "b"], "cpu"), TypeError, "returned a str: only tensors"),
        (lambda: gather([None, torch.ones(1)], "cpu"), ValueError, "outputs differ in type"),
        (lambda: gather([{"a": None}, {"b": None}], "cpu"), ValueError, "length or keys"),
        (lambda: gather([[None], [None, None]], "cpu"), ValueError, r"'list', 1.*'list', 2"),
    ],
)
def test_what_cannot_be_cut_or_put_together_is_said(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


def test_without_inputs_the_module_is_called_once() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self) -> Tensor:
            return self.w * 3

    assert MiniDataParallel(Constant(), ["cpu"] * 3)().tolist() == [3.0, 3.0]
