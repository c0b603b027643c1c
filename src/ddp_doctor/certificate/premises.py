"""Did the model get the same samples in two runs? Shown before their gradients are compared.

Three things are noted in each step that is compared, and each note is a premise: the rows that each
call of the trained model was given; the pairs of an output's and a target's row that each loss was
given; and the small tensors that the script reduced over the ranks. Rows are compared by value, in
any order.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_doctor.certificate.measure import TOLERANCE
from ddp_doctor.certificate.record import Premise
from ddp_doctor.facts.containers import tensors_in
from ddp_doctor.facts.places import place

MODEL, LOSS, NUMBERS, WEIGHTS, TIME = "model", "loss", "numbers", "weights", "time"
OUTPUT = "output"
MARK = "Mark the batch where the script has made it: x, y = ddp_doctor.batch((x, y))."
LOSSES = {
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
}
BYTES = 1 << 28  # what is kept of a step
Side = Sequence[Premise]  # of a comparison: what was noted of one step
Rows = Sequence[Tensor]


@dataclass(frozen=True)
class Doubt:
    """Why two runs may not have had the same samples.

    `is_violated`: they had others, as far as is seen; else it could not be shown that they had the
    same. `about_samples`: a mark might remove it, or samples that are replaced at the model only.
    `about_numbers`: a number that a call is given is another one, wherever samples are replaced.
    `excuses`: it would explain a difference, and says nothing against agreement.
    """

    why: str
    is_violated: bool = False
    about_samples: bool = False
    about_numbers: bool = False
    excuses: bool = False


class Premises:
    """The premises of one step. `clear` begins the next."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.notes: list[Premise] = []
        self.bytes = 0
        self.cells = 0  # calls of recurrent cells

    def note_model(self, key: str, inputs: Any, weights: float) -> None:
        """A call of a model whose first trained parameter is `key`. `weights` tells them apart."""
        self._note(WEIGHTS, key, weights=weights)
        tensors = [tensor for tensor in tensors_in(inputs, most=64) if tensor.dim()]
        for at, tensor in enumerate(_strided(tensors)):
            self.bytes += tensor.nbytes
            if self.bytes < BYTES:
                self._note(MODEL, f"{key}/{at}", rows=tensor.detach().cpu().clone())

    def note_outputs(self, result: Any) -> None:
        """What a model that is trained computed: of each output, a number per row of features."""
        outputs = [out for out in tensors_in(result, most=64) if out.requires_grad and out.dim()]
        for at, output in enumerate(_strided(outputs)):
            rows = output.detach()
            if rows.dim() > 1 and rows.is_floating_point():
                rows = rows @ _noise(rows.shape[-1]).to(rows)
            columns = list(output.shape[1:])
            self._note(OUTPUT, f"{at}", out=rows.flatten().cpu().double(), columns=columns)

    def note_loss(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A loss of outputs and targets, both with one sample per row."""
        out, target = [*args, kwargs.get("input"), kwargs.get("target")][:2]
        if type(out) is not Tensor or type(target) is not Tensor or out.is_meta:
            return
        if not out.requires_grad or not out.dim() or not target.dim() or len(out) != len(target):
            return
        counts = target.detach().cpu() != kwargs.get("ignore_index", -100)
        self._note(
            LOSS,
            name,
            columns=list(out.shape[1:]),
            targets=target.numel(),
            counts=counts.flatten(1).any(1) if counts.dim() > 1 else counts,
            out=_projection(out),
            target=_projection(target),
        )

    def note_reduction(self, tensor: Any) -> None:
        """The result of an all-reduce."""
        if type(tensor) is Tensor and tensor.numel() <= 16 and not tensor.requires_grad:
            self._note(NUMBERS, "", values=tensor.detach().cpu().double().flatten().clone())

    def note_layer(self, module: nn.Module, args: Any) -> None:
        """How long a sequence is whose first dimension is time, or that is read cell by cell."""
        if isinstance(module, nn.RNNCellBase):
            self.cells += 1
            self._note(TIME, "", length=self.cells)
        by_time = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
        if by_time and args and isinstance(args[0], Tensor) and args[0].dim() == 3:
            self._note(TIME, "", length=len(args[0]))

    def _note(self, kind: str, key: str, **values: Any) -> None:
        self.notes.append({"kind": kind, "key": key, "place": place(), **values})


def _strided(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if type(tensor) is Tensor and not tensor.is_meta]


def doubt_between(ranks: Side, run: Side) -> Doubt | None:
    """Where samples are not the same for all `ranks` and in another run; None if all are."""
    ranks, run = _without_offsets(ranks, run)
    doubt = _weights(ranks, run) or _models(ranks, run)
    return doubt or _times(ranks, run) or _losses(ranks, run)


def _without_offsets(*sides: Side) -> list[Side]:
    """Both without inputs that count 0, 3, 8, …: where in another input each sample begins."""
    rows: dict[str, list[Tensor]] = {}
    for call in (call for side in sides for call in _select(side, MODEL)):
        rows.setdefault(call["key"], []).append(call["rows"])
    offsets = {key for key, tensors in rows.items() if all(map(_are_offsets, tensors))}
    left_out = offsets if len(offsets) < len(rows) else set()
    return [[p for p in side if p["kind"] != MODEL or p["key"] not in left_out] for side in sides]


def _are_offsets(rows: Tensor) -> bool:
    counts = rows.dim() == 1 and len(rows) > 1 and rows.dtype in (torch.int32, torch.int64)
    return counts and not rows[0] and bool((rows.diff() >= 0).all())


def line_of_other_numbers(ranks: Side, run: Side) -> str:
    """The first reduced numbers that are not the same in two runs, in a sentence; or empty."""
    pairs = zip(_select(ranks, NUMBERS), _select(run, NUMBERS), strict=False)
    for numbers, other in pairs:
        a, b = numbers["values"], other["values"]
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, equal_nan=True):
            first, second = (", ".join(f"{v:.5g}" for v in x[:4].tolist()) for x in (a, b))
            line = numbers["place"]
            return f"At {line}, the ranks reduced to {first}, and one process to {second}."
    return ""


def same_totals(left: Side, right: Side) -> bool:
    """Whether the counts that were reduced at a line in two steps add up to the same numbers."""
    sums: list[dict[tuple[str, int], Tensor]] = [{}, {}]
    for total, premises in zip(sums, (left, right), strict=True):
        for numbers in _select(premises, NUMBERS):
            values, key = numbers["values"], (numbers["place"], len(numbers["values"]))
            if torch.equal(values, values.round()):
                total[key] = total.get(key, torch.zeros(len(values))) + values
    return all(torch.equal(sums[0][key], sums[1][key]) for key in sums[0].keys() & sums[1].keys())


def _select(premises: Side, kind: str, key: str | None = None) -> list[Premise]:
    return [p for p in premises if p["kind"] == kind and key in (None, p["key"])]


def _keys(premises: Side, kind: str) -> list[str]:
    return list(dict.fromkeys(premise["key"] for premise in _select(premises, kind)))


def _values(premises: Side, kind: str, key: str, name: str) -> list[Any]:
    return [premise[name] for premise in _select(premises, kind, key)]


def _model_of(key: str) -> str:
    """The first trained parameter of the model that got an input."""
    return key.split("/")[0]


def _weights(ranks: Side, run: Side) -> Doubt | None:
    """The first call of a model whose weights are not the same everywhere."""
    for call in _select(run, WEIGHTS):
        others = _values(ranks, WEIGHTS, call["key"], "weights")
        if not any(math.isclose(call["weights"], other, rel_tol=1e-6) for other in others):
            return Doubt(
                f"At {call['place']}, the model has other weights than on the ranks: the step "
                "moves them before this pass, each rank by its own gradient, so one process is no "
                "reference.",
                is_violated=True,
            )
    return None


def _models(ranks: Side, run: Side) -> Doubt | None:
    """The first call of a model that was given other rows. A wrapper may be given more tensors."""
    calls = _select(ranks, MODEL)
    if not calls:
        if _same_outputs(ranks, run):
            return None
        return Doubt("No call of a model with the optimizer's parameters was seen.")
    keys = _keys(ranks, MODEL)
    for key in _keys(run, MODEL):
        rows = _values(run, MODEL, key, "rows")
        model_keys = [k for k in keys if _model_of(k) == _model_of(key)]
        if not any(same_rows(_values(ranks, MODEL, k, "rows"), rows) for k in model_keys):
            line = _select(run, MODEL, key)[0]["place"]
            why = f"At {line}, the model does not get the samples that it gets on the ranks."
            return Doubt(why, is_violated=True, about_samples=True)
    models = dict.fromkeys(map(_model_of, keys))
    for model in models:
        sides = [_inputs(side, model) for side in (ranks, run)]
        if _inputs_apart(sides) or _ragged_apart(ranks, run, model):
            line = next(call["place"] for call in run if call["key"].startswith(f"{model}/"))
            why = f"At {line}, the model gets the rows of one input with other rows of another "
            return Doubt(f"{why}than on the ranks.", is_violated=True, about_samples=True)
    if models.keys() - set(map(_model_of, _keys(run, MODEL))):
        return Doubt(f"The call of the model at {calls[0]['place']} was not seen in both runs.")
    return None


def _same_outputs(ranks: Side, run: Side) -> bool:
    """Whether losses show that outputs are the same, where the script calls no module."""
    keys = _keys(ranks, LOSS)
    sides = [[_values(side, LOSS, key, "out") for key in keys] for side in (ranks, run)]
    return bool(keys) and all(
        bool(outs) and _same_values(torch.cat(others), torch.cat(outs))
        for others, outs in zip(*sides, strict=True)
    )


def _inputs(premises: Side, model: str) -> list[list[Tensor]]:
    """What each input of a model was in each of its calls; those with one row per sample."""
    keys = [key for key in _keys(premises, MODEL) if _model_of(key) == model]
    calls = [_values(premises, MODEL, key, "rows") for key in keys]
    return [call for call in calls if list(map(len, call)) == list(map(len, calls[0]))]


def _ragged_apart(ranks: Side, run: Side, model: str) -> bool:
    """Whether an input with several rows per sample is in another order than one with one row.

    As of the values of a ragged batch, when its lengths are in the order of the ranks.
    """
    orders: dict[bool, list[bool]] = {True: [], False: []}  # by whether it has a row per sample
    lengths = None
    for key in _keys(ranks, MODEL):
        sides = [_values(side, MODEL, key, "rows") for side in (ranks, run)]
        if _model_of(key) == model and all(sides) and sides[0][0].dtype == sides[1][0].dtype:
            counts = list(map(len, sides[0]))
            lengths = lengths or counts
            shapes = {rows.shape[1:] for side in sides for rows in side}
            same = len(shapes) == 1 and torch.equal(torch.cat(sides[0]), torch.cat(sides[1]))
            orders[counts == lengths].append(same)
    return any(orders[True]) and not all(orders[False])


def _inputs_apart(sides: list[list[list[Tensor]]]) -> bool:
    """Whether the rows of a model's inputs have come apart."""
    if min(map(len, sides)) < 2 or len(sides[0]) != len(sides[1]):
        return False
    for front in (True, False):
        sums: list[Any] = [0.0, 0.0]
        for at, (ranks, run) in enumerate(zip(*sides, strict=True)):
            tensors = [*ranks, *run]
            if len({(rows.dim(), rows.dtype) for rows in tensors}) != 1:
                return False
            numbers = [_projection(rows) for rows in _crop(tensors, 0, front)]
            size = _size(torch.cat(numbers))
            both = (torch.cat(numbers[: len(ranks)]), torch.cat(numbers[len(ranks) :]))
            sums = [s + math.e**at * row / size for s, row in zip(sums, both, strict=True)]
        if not isinstance(sums[0], Tensor) or _same_values(*sums):
            return False
    return True


def _times(ranks: Side, run: Side) -> Doubt | None:
    """The first layer that gets longer sequences: samples were joined along time."""
    limit = max((layer["length"] for layer in _select(ranks, TIME)), default=0)
    for layer in _select(run, TIME):
        if layer["length"] > limit:
            return Doubt(
                f"At {layer['place']}, a layer's sequences are longer than on the ranks: its "
                "samples are along the second dimension. Take them from a DataLoader, or use "
                "batch_first.",
                is_violated=True,
            )
    return None


def _losses(ranks: Side, run: Side) -> Doubt | None:
    """The first loss whose targets have come apart from its outputs."""
    for key in _keys(ranks, LOSS):
        sides = [_select(ranks, LOSS, key), _select(run, LOSS, key)]
        columns = {tuple(loss["columns"]) for side in sides for loss in side}
        if len(columns) != 1 or not sides[1]:
            continue
        if any(_targets_apart(*(_pairs(side, only) for side in sides)) for only in (False, True)):
            why = f"At {sides[1][0]['place']}, the targets are not with the outputs that they are "
            return Doubt(f"{why}with on the ranks.", is_violated=True, about_samples=True)
    return None


def _pairs(losses: Side, only_counted: bool) -> tuple[Tensor, Tensor]:
    """Outputs and targets of some calls; without those that the loss ignores, or with them."""
    names = ("out", "target", "counts")
    out, target, counts = (torch.cat([loss[name] for loss in losses]) for name in names)
    return (out[counts], target[counts]) if only_counted else (out, target)


def _targets_apart(ranks: tuple[Tensor, Tensor], run: tuple[Tensor, Tensor]) -> bool:
    """Whether the outputs are the same, but not the targets that they are with.

    Targets that count 0, 1, 2, … are positions in a batch, which one process makes by itself.
    """
    is_count = torch.equal(run[1], torch.arange(len(run[1])).double())
    if is_count or not _same_values(ranks[0], run[0]):
        return False
    sizes = [_size(numbers) for numbers in ranks]
    sums = [out / sizes[0] + math.e * target / sizes[1] for out, target in (ranks, run)]
    return not _same_values(sums[0], sums[1])


def other_counts(rank: Side, run: Side, world: int, same_samples: bool) -> str:
    """The first counts that a rank and one process reduced to other numbers.

    One process reduces a 1 to 1, as it has one rank; and of an average of counts it gets W times.
    `shared`: the ranks have the same samples, which their sum counts W times.
    """
    sides = _select(rank, NUMBERS), _select(run, NUMBERS)
    if len(sides[0]) != len(sides[1]):
        return ""
    for numbers, other in zip(*sides, strict=True):
        a, b = numbers["values"], other["values"]
        is_whole = bool((a == a.round()).all() and (b == b.round()).all())
        counts_ranks = torch.equal(a, b * world) and (same_samples or bool((b <= 1).all()))
        if is_whole and not (counts_ranks or torch.equal(a, b) or torch.equal(a * world, b)):
            return line_of_other_numbers([numbers], [other])
    return ""


def line_of_other_outputs(left: Side, right: Side) -> str:
    """The line of the first model or loss that computed other numbers in two runs of the same
    samples, in whatever order; or empty. A gradient of other samples may explain it, and padding.
    """
    for kind in (OUTPUT, LOSS):
        for key in _keys(left, kind):
            sides = [_select(side, kind, key) for side in (left, right)]
            a, b = (torch.cat([o["out"] for o in side] or [torch.zeros(0)]) for side in sides)
            columns = {tuple(premise["columns"]) for side in sides for premise in side}
            if len(a) == len(b) and len(columns) == 1:
                distance = (a.sort().values - b.sort().values).norm()
                if bool(distance > TOLERANCE * b.norm()):
                    return str(sides[0][0]["place"])
    return ""


def same_rows(left: Rows, right: Rows) -> bool:
    """Whether both hold the same rows in any order, along the first or the second dimension.

    Longer rows may go on with padding, at the end or at the beginning. Equal constants are the
    same, however often they are there.
    """
    tensors = [*left, *right]
    if not right or len({(rows.dim(), rows.dtype) for rows in tensors}) != 1:
        return False
    for front in (True, False):
        for dim in range(min(2, tensors[0].dim())):
            crops = _crop(tensors, dim, front)
            lengths = crops[0].shape
            # What rows of several lengths have beyond the shortest is no padding.
            ragged_dims = {d for d in range(1, len(lengths)) if len({t.shape[d] for t in left}) > 1}
            dims = set(range(len(lengths))) - ragged_dims - {dim}
            if not all(_only_padding_left(t, lengths[d], d, front) for t in tensors for d in dims):
                continue  # rows are samples here, and these are fewer
            first, *others = crops
            if all(rows.shape == first.shape and torch.equal(rows, first) for rows in others):
                return True
            numbers = [_projection(rows.transpose(0, dim)) for rows in crops]
            both = torch.cat(numbers[: len(left)]), torch.cat(numbers[len(left) :])
            if _same_values(*both, first.dtype):
                return True
    return False


def _crop(tensors: Rows, dim: int, front: bool) -> list[Tensor]:
    """All as long as the shortest, in each dimension but `dim`."""
    out = [rows.nan_to_num() if rows.is_floating_point() else rows for rows in tensors]
    for other in range(tensors[0].dim()):
        if other != dim:
            length = min(rows.shape[other] for rows in tensors)
            out = [t.narrow(other, 0 if front else t.shape[other] - length, length) for t in out]
    return out


def _only_padding_left(tensor: Tensor, length: int, dim: int, front: bool) -> bool:
    """Whether all that is beyond a length in a dimension holds one and the same value."""
    margin = tensor.narrow(dim, length if front else 0, tensor.shape[dim] - length).nan_to_num()
    return not margin.numel() or bool((margin == margin.flatten()[0]).all())


def _projection(tensor: Tensor) -> Tensor:
    """A number for each row; rows that differ have different ones."""
    rows = tensor.detach().cpu().double().nan_to_num()
    if rows.dim() < 2:
        return rows
    flat = rows.flatten(1)
    return flat @ _noise(flat.shape[1])


def _noise(width: int) -> Tensor:
    """On the CPU, whatever device the script has chosen."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, generator=generator, dtype=torch.float64, device="cpu")


def _size(numbers: Tensor) -> float:
    """The root of the mean square; 1 if that is zero."""
    return float(numbers.square().mean().sqrt()) or 1.0


def _same_values(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether both hold the same numbers in any order, up to rounding."""
    if len(left) != len(right):
        return False
    left, right = left.sort().values, right.sort().values
    is_exact = not dtype.is_floating_point
    step = 1e-9 if is_exact else (64 if dtype.itemsize >= 4 else 4) * torch.finfo(dtype).eps
    size = float(left.square().mean().sqrt()) if len(left) else 0.0
    return not bool(((left - right).abs() > step * (size + 1e-30)).any())
