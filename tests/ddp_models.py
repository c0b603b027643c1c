"""Small models for the tests of MiniDDP, each with one trait that a reducer may stumble over.

`MODELS` maps a trait to a function that builds the model and one that draws a batch for it. A model
returns whatever it likes; `loss_of` reduces any nested output to one number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint


def mlp():
    """Of one child."""
    layers = (nn.Linear(12, 300), nn.ReLU(), nn.Linear(300, 900), nn.Tanh(), nn.Linear(900, 3))
    return nn.Sequential(nn.Sequential(*layers))


class TiedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(12, 8)
        self.decode = nn.Linear(8, 12)
        self.decode.weight = nn.Parameter(torch.randn(12, 8) / 4)
        self.output = nn.Linear(12, 8, bias=False)
        self.output.weight = self.encode.weight

    def forward(self, x):
        return self.output(self.decode(torch.tanh(self.encode(x))))


def used_twice():
    layer = nn.Linear(12, 12)
    return nn.Sequential(layer, nn.Tanh(), layer)


def frozen():
    model = nn.Sequential(nn.Linear(12, 10).requires_grad_(False), nn.ReLU(), nn.Linear(10, 4))
    model[2].bias.requires_grad_(False)
    return model


class Branches(nn.Module):
    """The first input's sign decides which branch is taken; `never` is used by no rank."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 6)
        self.left = nn.Linear(6, 5)
        self.right = nn.Linear(6, 5)
        self.never = nn.Linear(6, 5)

    def forward(self, x):
        stem = torch.relu(self.stem(x))
        return (self.left if x[0, 0] > 0 else self.right)(stem)


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.float32_layer = nn.Linear(12, 16)
        self.float64_layer = nn.Linear(16, 16).double()
        self.bfloat16_layer = nn.Linear(16, 5).bfloat16()

    def forward(self, x):
        return self.bfloat16_layer(
            self.float64_layer(self.float32_layer(x).double()).bfloat16()
        ).float()


def batch_norm():
    return nn.Sequential(nn.Sequential(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Linear(10, 4)))


class Convolution(nn.Module):
    """With one weight in channels-last order: dense memory, but not row by row."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4 * 4 * 4, 5)

    def forward(self, x):
        return self.head(self.second(torch.relu(self.first(x))).flatten(1))


class Embedding(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.words = nn.Embedding(50, 6, sparse=sparse)
        self.head = nn.Linear(6, 5)

    def forward(self, words):
        return self.head(self.words(words).mean(1))


class OddShapes(nn.Module):
    """A scalar parameter, one without elements, and one whose memory has gaps."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 12))
        self.gaps = nn.Parameter(torch.randn(12, 10)[:, ::2])
        self.layer = nn.Linear(12, 5)

    def forward(self, x):
        return self.scale * self.layer(x) + (x @ self.nothing.t()).sum() + x @ self.gaps


class Complex(nn.Module):
    """A complex matrix, and numbers whose gradients are negated or conjugated lazily."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(12, 6, dtype=torch.complex64) / 4)
        self.real = nn.Parameter(torch.tensor(0.8))
        self.imaginary = nn.Parameter(torch.tensor(0.6))
        self.shift = nn.Parameter(torch.tensor(0.1 + 0.2j))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        mixed = x.to(torch.complex64) @ self.mix
        turned = torch.complex(self.real, self.imaginary).conj() * mixed
        return self.head((turned + self.shift.conj()).abs())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(12, 12)
        self.block = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 12))
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


@dataclass
class Heads:
    logits: Tensor
    extra: dict[str, Any]


class NestedOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 10)
        self.heads = nn.ModuleList(nn.Linear(10, n) for n in (2, 3, 4))

    def forward(self, x):
        a, b, c = (head(torch.relu(self.stem(x))) for head in self.heads)
        return Heads(logits=a, extra={"pair": (b, [c]), "name": "heads"})


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        hidden = self.block(self.words(words))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), words.roll(-1, 1).flatten())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(6, 12, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        states, last = self.cell(x.view(-1, 2, 6))
        return {"head": self.head(states), "last": last}


class TwoHeads(nn.Module):
    """The head is chosen by the caller; the other one is unused. The same on every rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, head):
        return getattr(self, head)(self.stem(x))


class UsedTwice(nn.Module):
    """A layer in the middle is called twice, and checkpointed by the reentrant variant."""

    def __init__(self):
        super().__init__()
        self.stem, self.shared, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        x = self.stem(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)


def linear():
    """The same on every rank."""
    torch.manual_seed(3)
    return nn.Linear(3, 2)


def rows(rank: int, step: int = 0) -> Tensor:
    """Two inputs of `linear` or `TwoHeads`, different on every rank and in every step."""
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + rank))


class Model(NamedTuple):
    build: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]


def _vectors(n: int) -> Tensor:
    return torch.randn(n, 12)


def _sentences(n: int) -> Tensor:
    return torch.randint(0, 50, (n, 7))


MODELS = {
    "mlp": Model(mlp, _vectors),
    "tied weights": Model(TiedWeights, _vectors),
    "a parameter used twice": Model(used_twice, _vectors),
    "frozen parameters": Model(frozen, _vectors),
    "branches": Model(Branches, _vectors),
    "mixed dtypes": Model(MixedDtypes, _vectors),
    "batch norm": Model(batch_norm, _vectors),
    "convolution": Model(Convolution, lambda n: torch.randn(n, 3, 6, 6)),
    "dense embedding": Model(lambda: Embedding(sparse=False), _sentences),
    "sparse embedding": Model(lambda: Embedding(sparse=True), _sentences),
    "odd shapes": Model(OddShapes, _vectors),
    "complex": Model(Complex, _vectors),
    "checkpointed, reentrant": Model(lambda: Checkpointed(reentrant=True), _vectors),
    "checkpointed, not reentrant": Model(lambda: Checkpointed(reentrant=False), _vectors),
    "nested outputs": Model(NestedOutputs, _vectors),
    "transformer": Model(Transformer, _sentences),
    "recurrent": Model(Recurrent, _vectors),
}


def loss_of(output: Any) -> Tensor:
    """The mean square of every tensor in `output`, summed; a scalar output is the loss itself."""
    if isinstance(output, Heads):
        return loss_of(output.logits) + loss_of(output.extra)
    if isinstance(output, dict):
        return sum(loss_of(part) for part in output.values())
    if isinstance(output, list | tuple):
        return sum(loss_of(part) for part in output)
    if not isinstance(output, Tensor):
        return torch.zeros(())
    return output if output.ndim == 0 else output.pow(2).mean()


def torchs_ddp_takes(name: str, mode: str) -> bool:
    """Whether torch's DDP neither refuses a model of `MODELS` in a mode nor raises in it."""
    if name == "branches":
        return mode.startswith("unused")
    if name == "checkpointed, reentrant":
        return not mode.startswith("unused")
    return name != "nested outputs" or not mode.startswith("static graph")  # it reduces nothing


def dense_gradients(module: nn.Module) -> list[Tensor | None]:
    """A copy of each parameter's gradient."""
    found = [parameter.grad for parameter in module.parameters()]
    return [g if g is None else (g.to_dense() if g.is_sparse else g).clone() for g in found]


# For the models under `fully_shard`, ours and torch's.

POLICIES = {
    "bfloat16, reduced in float32": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
    "float16": MixedPrecisionPolicy(param_dtype=torch.float16),
}


def whole(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy of the whole of a DTensor, of one of our shards, or of neither."""
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor().clone()
    sharding = getattr(parameter, "sharding", None)
    return (sharding.gather(tensor) if sharding else tensor).clone()
