"""Tiny models on a mesh of 2 × 2 ranks, and known wrong ways to combine their gradients.

    def on_this_rank(rank, world_size):
        return measure(WAYS["tensor"], Mesh(data=2, tensor=2), Mesh())

    judged = judge(run_ranks(on_this_rank, 4))

A program has the loss of one rank and says which parameters are sharded. One rule serves all of
them: divide by the tokens of the step, then add up each parameter's gradient along every dimension
in which it has copies. A wrong way differs from the rule in a field or two.

A mesh is any object with the methods of `Grid`, such as `miniddp.collectives.mesh.Mesh`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from labkit.testing.compare import Comparison, compared, kind_of, same_bits

SEQUENCES, LENGTH, WIDTH, HIDDEN, CLASSES = 2, 8, 6, 8, 4
IGNORED = -100  # the target of a token without a loss, as in F.cross_entropy
Parameters = Mapping[str, Tensor]


class Grid(Protocol):
    """Named dimensions of ranks; `sum` and `gather` carry gradients, `add_up` works in place."""

    def size(self, dimension: str) -> int: ...
    def index(self, dimension: str) -> int: ...
    def sum(self, tensor: Tensor, dimension: str) -> Tensor: ...
    def gather(self, tensor: Tensor, dimension: str) -> Tensor: ...
    def add_up(self, gradient: Tensor, dimensions: Iterable[str]) -> None: ...


Loss = Callable[[Parameters, Tensor, Tensor, Grid], Tensor]
Gather = Callable[[Tensor, str], Tensor]


class Program(NamedTuple):
    """A model and a loss on one mesh, and how gradients are combined.

    Attributes:
        dimensions: the mesh's two dimensions, of 2 ranks each.
        split: those along which ranks hold different tokens: whole sequences along the first one,
            halves of a sequence along the second.
        shapes: the whole parameters.
        loss: the summed loss of a rank, from its parameters and one (part of a) sequence. A term
            that several ranks compute is divided by their number.
        sharded: parameter → (mesh dimension, tensor dimension).
        counted: the dimensions along which token counts are added.
        summed: parameter → the dimensions along which its gradient is added.
        scaled: parameter → a factor on its gradient, which the rule does not have.
    """

    dimensions: tuple[str, str]
    split: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    loss: Loss
    sharded: Mapping[str, tuple[str, int]]
    counted: tuple[str, ...]
    summed: Mapping[str, tuple[str, ...]]
    scaled: Mapping[str, float] = {}


def by_the_rule(
    dimensions: tuple[str, str],
    split: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    loss: Loss,
    sharded: Mapping[str, tuple[str, int]],
) -> Program:
    """Count tokens where they differ; add up along every dimension that does not shard."""
    summed = {}
    for name in shapes:
        shards_it, _ = sharded.get(name, (None, None))
        summed[name] = tuple(d for d in dimensions if d != shards_it)
    return Program(dimensions, split, shapes, loss, sharded, counted=split, summed=summed)


def batch() -> tuple[Tensor, Tensor]:
    """Inputs (2 sequences, 8 tokens, 6) and targets (2, 8); of the targets, 11 are not ignored."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=generator)
    targets = torch.randint(CLASSES, (SEQUENCES, LENGTH), generator=generator)
    inputs[1] += 1  # another topic: its tokens choose the same expert
    targets[0, :3] = IGNORED
    targets[1, [0, 7]] = IGNORED
    return inputs, targets


def gradients(program: Program, mesh: Grid) -> dict[str, Tensor]:
    """The combined gradients that this rank holds."""
    inputs, targets = own_tokens(program, mesh)
    count = (targets != IGNORED).sum().float()
    for dimension in program.counted:
        count = mesh.sum(count, dimension)

    own = own_parameters(program, mesh)
    for sequence, wanted in zip(inputs, targets, strict=True):
        (program.loss(own, sequence, wanted, mesh) / count).backward()

    for name, parameter in own.items():
        mesh.add_up(parameter.grad, program.summed[name])
        parameter.grad *= program.scaled.get(name, 1)
    return {name: parameter.grad for name, parameter in own.items()}


def own_tokens(program: Program, mesh: Grid) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch: whole sequences, or halves of them."""
    inputs, targets = batch()
    for axis, dimension in enumerate(program.split):
        own = mesh.index(dimension)
        inputs, targets = (t.chunk(mesh.size(dimension), axis)[own] for t in (inputs, targets))
    return inputs, targets


def own_parameters(program: Program, mesh: Grid) -> dict[str, Tensor]:
    """This rank's shards and copies; their gradients are zero, not None."""
    own = {}
    for name, part in shards(program, parameters(program), mesh).items():
        own[name] = part.clone().requires_grad_()
        own[name].grad = torch.zeros_like(part)
    return own


def shards(program: Program, whole: Parameters, mesh: Grid) -> dict[str, Tensor]:
    """What one rank holds of parameters or of their gradients."""
    held = dict(whole)
    for name, (dimension, axis) in program.sharded.items():
        held[name] = whole[name].chunk(mesh.size(dimension), axis)[mesh.index(dimension)]
    return held


def parameters(program: Program) -> dict[str, Tensor]:
    """The whole parameters, the same in every process."""
    generator = torch.Generator().manual_seed(14)
    return {
        name: torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 2)
        for name, shape in program.shapes.items()
    }


# Tensor parallelism -------------------------------------------------------------------------------


def mlp(p: Parameters, x: Tensor, mesh: Grid) -> Tensor:
    """Column-parallel, then row-parallel: each rank has half of the hidden units."""
    normed = F.rms_norm(x, x.shape[-1:], p["norm"])
    hidden = torch.tanh(F.linear(normed, p["up"], p["up_bias"]))
    return mesh.sum(F.linear(hidden, p["down"]), "tensor") + p["down_bias"]


def mlp_loss(p: Parameters, x: Tensor, targets: Tensor, mesh: Grid) -> Tensor:
    loss = F.cross_entropy(mlp(p, x, mesh), targets, reduction="sum")
    return loss / mesh.size("tensor")  # all ranks of the group compute every term


MLP = {
    "norm": (WIDTH,),
    "up": (HIDDEN, WIDTH),
    "up_bias": (HIDDEN,),
    "down": (CLASSES, HIDDEN),
    "down_bias": (CLASSES,),
}
TENSOR = by_the_rule(
    ("data", "tensor"),
    ("data",),
    MLP,
    mlp_loss,
    {"up": ("tensor", 0), "up_bias": ("tensor", 0), "down": ("tensor", 1)},
)


# Context parallelism ------------------------------------------------------------------------------


def attention_loss(
    p: Parameters, x: Tensor, targets: Tensor, mesh: Grid, gather: Gather | None = None
) -> Tensor:
    """Causal attention: a rank has half of the tokens, and the keys and values of all."""
    gather = gather or mesh.gather
    keys, values = (gather(x @ p[name], "context") for name in ("key", "value"))
    scores = x @ p["query"] @ keys.T
    first = len(x) * mesh.index("context")
    later = torch.ones_like(scores).triu(first + 1).bool()
    out = scores.masked_fill(later, -torch.inf).softmax(1) @ values @ p["out"]
    return F.cross_entropy(out, targets, reduction="sum")


def gathered_plainly(mesh: Grid, tensor: Tensor, dimension: str) -> Tensor:
    """The others' tensors are constants for autograd."""
    pieces = list(mesh.gather(tensor.detach(), dimension).chunk(mesh.size(dimension)))
    pieces[mesh.index(dimension)] = tensor
    return torch.cat(pieces)


def plainly_gathered_keys(p: Parameters, x: Tensor, targets: Tensor, mesh: Grid) -> Tensor:
    return attention_loss(p, x, targets, mesh, partial(gathered_plainly, mesh))


def gathered_along_data(p: Parameters, x: Tensor, targets: Tensor, mesh: Grid) -> Tensor:
    return attention_loss(p, x, targets, mesh, lambda tensor, _: mesh.gather(tensor, "data"))


def count_overwritten(p: Parameters, x: Tensor, targets: Tensor, mesh: Grid) -> Tensor:
    """The mean of the own terms times their count; but an all-reduce in place changes the count."""
    own = (targets != IGNORED).sum()
    dist.all_reduce(own)  # for the count of all ranks; that of the own terms is lost
    return attention_loss(p, x, targets, mesh) / (targets != IGNORED).sum() * own


CONTEXT = by_the_rule(
    ("data", "context"),
    ("data", "context"),
    {**dict.fromkeys(("query", "key", "value"), (WIDTH, WIDTH)), "out": (WIDTH, CLASSES)},
    attention_loss,
    {},
)


# Expert parallelism -------------------------------------------------------------------------------


def experts(p: Parameters, tokens: Tensor, weight: Tensor, chosen: Tensor, mesh: Grid) -> Tensor:
    """This rank's experts' answers for all tokens of the group; 0 for the others' tokens."""
    answers = tokens.new_zeros(len(tokens), CLASSES)
    first = len(p["up"]) * mesh.index("expert")
    for number, (up, down) in enumerate(zip(p["up"], p["down"], strict=True), first):
        mine = chosen == number  # may be empty: the gradients are then 0, not None
        answers[mine] = weight[mine, None] * (torch.tanh(tokens[mine] @ up) @ down)
    return answers


def experts_loss(
    p: Parameters, x: Tensor, targets: Tensor, mesh: Grid, gather: Gather | None = None
) -> Tensor:
    """A rank has its own tokens and one of two experts; a token goes to its best expert."""
    gather = gather or mesh.gather
    weight, chosen = (x @ p["router"]).softmax(1).max(1)
    tokens, weight, chosen = (gather(t, "expert") for t in (x, weight, chosen))
    answers = mesh.sum(experts(p, tokens, weight, chosen, mesh), "expert")
    own = answers.chunk(mesh.size("expert"))[mesh.index("expert")]
    return F.cross_entropy(own, targets, reduction="sum")


def plainly_gathered_weights(p: Parameters, x: Tensor, targets: Tensor, mesh: Grid) -> Tensor:
    return experts_loss(p, x, targets, mesh, partial(gathered_plainly, mesh))


def zero_only_in_forward(p: Parameters, x: Tensor, targets: Tensor, mesh: Grid) -> Tensor:
    """Each rank runs its expert on all tokens; a weight of 0 hides those of the other expert."""
    weight, chosen = (x @ p["router"]).softmax(1).max(1)
    tokens, weight, chosen = (mesh.gather(t, "expert") for t in (x, weight, chosen))
    with torch.no_grad():
        weight[chosen != mesh.index("expert")] = 0
    everywhere = torch.full_like(chosen, mesh.index("expert"))
    answers = mesh.sum(experts(p, tokens, weight, everywhere, mesh), "expert")
    own = answers.chunk(mesh.size("expert"))[mesh.index("expert")]
    return F.cross_entropy(own, targets, reduction="sum")


EXPERT = by_the_rule(
    ("data", "expert"),
    ("data", "expert"),
    {"router": (WIDTH, 2), "up": (2, WIDTH, HIDDEN), "down": (2, HIDDEN, CLASSES)},
    experts_loss,
    {"up": ("expert", 0), "down": ("expert", 0)},
)


# Sharded replicas and pipelines -------------------------------------------------------------------


def sharded_loss(p: Parameters, x: Tensor, targets: Tensor, mesh: Grid) -> Tensor:
    """Gather each parameter; the gather's backward leaves the sum for this rank's shard."""
    return mlp_loss({name: mesh.gather(p[name], "shard") for name in p}, x, targets, mesh)


HSDP = by_the_rule(
    ("replica", "shard"),
    ("replica", "shard"),
    MLP,
    sharded_loss,
    dict.fromkeys(MLP, ("shard", 0)),
)


def pipeline_loss(p: Parameters, x: Tensor, targets: Tensor, mesh: Grid) -> Tensor:
    """Two stages, two micro-batches, one layer per stage; input and output share a weight."""
    first, last = mesh.index("stage") == 0, mesh.index("stage") == mesh.size("stage") - 1
    total = x.new_zeros(())
    for micro, wanted in zip(x.chunk(2), targets.chunk(2), strict=True):
        sent = torch.zeros(len(micro), HIDDEN, requires_grad=True)  # takes part in backward, too
        if first:
            sent = torch.tanh(micro @ p["tied"] @ p["layers"][0])
        received = mesh.sum(sent, "stage")  # to the last stage; its backward sends the gradient
        if last:
            scores = torch.tanh(received @ p["layers"][-1]) @ p["tied"].T
            total = total + F.cross_entropy(scores, wanted, reduction="sum")
        else:
            total = total + 0 * received.sum()  # so that backward gets the gradient
    return total


PIPELINE = by_the_rule(
    ("data", "stage"),
    ("data",),
    {"tied": (WIDTH, HIDDEN), "layers": (2, HIDDEN, HIDDEN)},
    pipeline_loss,
    {"layers": ("stage", 0)},
)


# Right and wrong ways -----------------------------------------------------------------------------


def times(program: Program, factor: float, *names: str) -> Program:
    """The program with a factor on the gradients of these parameters, or of all."""
    return program._replace(scaled=dict.fromkeys(names or program.shapes, factor))


def summed(program: Program, along: Iterable[str], *names: str) -> Program:
    """The program that adds up the gradients of these parameters, or of all, along `along`."""
    changed = dict.fromkeys(names or program.shapes, tuple(along))
    return program._replace(summed={**program.summed, **changed})


WAYS: dict[str, dict[str, Program]] = {
    "context": {
        "the rule": CONTEXT,
        "averaged over 4 ranks, × 2": times(CONTEXT, 2 / 4),
        "own means, averaged": times(CONTEXT._replace(counted=()), 1 / 4),
        "own count, overwritten": CONTEXT._replace(loss=count_overwritten),
        "summed along data only": summed(CONTEXT, ["data"]),
        "keys and values gathered along data": CONTEXT._replace(loss=gathered_along_data),
        "keys and values gathered plainly": CONTEXT._replace(loss=plainly_gathered_keys),
    },
    "tensor": {
        "the rule": TENSOR,
        "copies of terms summed": times(TENSOR, 2),
        "tokens counted on all ranks": TENSOR._replace(counted=("data", "tensor")),
        "norm summed along data only": summed(TENSOR, ["data"], "norm"),
        "row bias summed once more": times(TENSOR, 2, "down_bias"),
        "row bias ÷ 2, not summed": times(TENSOR, 1 / 2, "down_bias"),
    },
    "expert": {
        "the rule": EXPERT,
        "experts averaged over copies": times(EXPERT, 2, "up", "down"),
        "experts summed along both": summed(EXPERT, ["data", "expert"], "up", "down"),
        "router summed along data only": summed(EXPERT, ["data"], "router"),
        "weights gathered plainly": EXPERT._replace(loss=plainly_gathered_weights),
        "weights zero in forward only": EXPERT._replace(loss=zero_only_in_forward),
    },
    "hsdp": {
        "the rule": HSDP,
        "averaged over shards only": times(HSDP, 2),
        "not summed along replicas": summed(HSDP, []),
    },
    "pipeline": {
        "the rule": PIPELINE,
        "divided in the log only": times(PIPELINE, 11),
        "divided by micro-batches, too": times(PIPELINE, 1 / 2),
        "tied weight summed along data only": summed(PIPELINE, ["data"], "tied"),
    },
}


# Comparing ----------------------------------------------------------------------------------------


class Judged(NamedTuple):
    """A way's gradients on all ranks together, and its worst parameter.

    `copies_agree` is False if ranks that hold the same (shard of a) parameter have different bits.
    """

    way: str
    comparison: Comparison
    worst: str
    of_worst: Comparison
    copies_agree: bool

    @property
    def right(self) -> bool:
        """Whether every parameter's gradient is right, on every rank."""
        return self.copies_agree and kind_of(self.of_worst) == "right"

    @property
    def kind(self) -> str:
        """What is wrong; a bug that only a small parameter has is one of direction."""
        if not self.copies_agree:
            return "copies differ"
        kind = kind_of(self.comparison)
        return "direction bug" if kind == "right" and not self.right else kind


Measured = dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]


def measure(ways: Mapping[str, Program], mesh: Grid, alone: Grid) -> Measured:
    """Each way's gradients on this rank, and the same shards of the first way's in one process."""
    right = next(iter(ways.values()))
    wanted = shards(right, gradients(right, alone), mesh)
    return {name: (gradients(program, mesh), wanted) for name, program in ways.items()}


def judge(of_ranks: Sequence[Measured]) -> list[Judged]:
    """Compare what the ranks returned from `measure`."""
    found = []
    for way in of_ranks[0]:
        ranks = [of_rank[way] for of_rank in of_ranks]
        names = list(ranks[0][0])
        pairs = {n: [(got[n], true[n]) for got, true in ranks] for n in names}
        of_names = {n: compared(*zip(*own, strict=True)) for n, own in pairs.items()}
        everything = compared(*zip(*chain(*pairs.values()), strict=True))
        worst = max(names, key=lambda n: round(_distance(of_names[n]), 3))  # of equals the first
        agree = all(
            same_bits([got[n]], [other[n]])
            for got, true in ranks
            for other, others_true in ranks
            for n in names
            if torch.equal(true[n], others_true[n])
        )
        found.append(Judged(way, everything, worst, of_names[worst], agree))
    return found


def _distance(comparison: Comparison) -> float:
    """‖g − g*‖² / ‖g*‖²."""
    ratio, cosine = comparison
    return 1 + ratio**2 - 2 * ratio * cosine if ratio else 1.0
