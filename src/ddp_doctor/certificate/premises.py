"""Did the model get the same samples in two runs? Shown before their gradients are compared.

Three things are recorded in each step that is compared: the rows that each call of the trained
model was given; the pairs of an output's and a target's row that each loss was given; and the small
tensors that the script reduced over the ranks. `parted` compares rows by value, in any order.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_doctor.certificate.measure import TOLERANCE
from ddp_doctor.certificate.record import Seen
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


@dataclass(frozen=True)
class Doubt:
    """Why two runs may not have had the same samples.

    `violated`: they had others, as far as is seen; else it could not be shown that they had the
    same. `of_samples`: a mark might remove it, or samples that are replaced at the model only.
    `of_numbers`: a number that a call is given is another one, wherever samples are replaced.
    `excuses`: it would explain a difference, and says nothing against agreement.
    """

    why: str
    violated: bool = False
    of_samples: bool = False
    of_numbers: bool = False
    excuses: bool = False


class Premises:
    """What is seen of one step. `clear` begins the next."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seen: list[Seen] = []
        self.bytes = 0
        self.cells = 0  # calls of recurrent cells

    def model(self, key: str, given: Any, weights: float) -> None:
        """A call of a model whose first trained parameter is `key`. `weights` tells them apart."""
        self._note(WEIGHTS, key, weights=weights)
        tensors = [one for one in tensors_in(given, most=64) if one.dim()]
        for at, one in enumerate(t for t in tensors if type(t) is Tensor and not t.is_meta):
            self.bytes += one.nbytes
            if self.bytes < BYTES:
                rows = one.detach().cpu().clone()
                self._note(MODEL, f"{key}/{at}", rows=rows)

    def computed(self, result: Any) -> None:
        """What a model that is trained computed: of each output, a number per row of features."""
        outputs = [one for one in tensors_in(result, most=64) if one.requires_grad and one.dim()]
        for at, one in enumerate(t for t in outputs if type(t) is Tensor and not t.is_meta):
            rows = one.detach()
            if rows.dim() > 1 and rows.is_floating_point():
                rows = rows @ _noise(rows.shape[-1]).to(rows)
            out, columns = rows.flatten().cpu().double(), list(one.shape[1:])
            self._note(OUTPUT, f"{at}", out=out, columns=columns)

    def loss(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A loss of outputs and targets, both with one sample per row."""
        out, target = [*args, kwargs.get("input"), kwargs.get("target")][:2]
        if not (isinstance(out, Tensor) and isinstance(target, Tensor)) or out.is_meta:
            return
        if not out.requires_grad or not out.dim() or not target.dim() or len(out) != len(target):
            return
        if type(out) is Tensor and type(target) is Tensor:
            kept = target.detach().cpu() != kwargs.get("ignore_index", -100)
            self._note(
                LOSS,
                name,
                columns=list(out.shape[1:]),
                targets=target.numel(),
                kept=kept.flatten(1).any(1) if kept.dim() > 1 else kept,
                out=_projected(out),
                target=_projected(target),
            )

    def reduced(self, tensor: Any) -> None:
        """The result of an all-reduce."""
        if type(tensor) is Tensor and tensor.numel() <= 16 and not tensor.requires_grad:
            self._note(NUMBERS, "", values=tensor.detach().cpu().double().flatten().clone())

    def in_layer(self, module: nn.Module, args: Any) -> None:
        """How long a sequence is whose first dimension is time, or that is read cell by cell."""
        if isinstance(module, nn.RNNCellBase):
            self.cells += 1
            self._note(TIME, "", length=self.cells)
        in_time = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
        if in_time and args and isinstance(args[0], Tensor) and args[0].dim() == 3:
            self._note(TIME, "", length=len(args[0]))

    def _note(self, what: str, key: str, **of: Any) -> None:
        self.seen.append({"what": what, "key": key, "place": place(), **of})


def parted(ours: Iterable[Seen], theirs: Iterable[Seen]) -> Doubt | None:
    """Where samples are not the same in two runs; None if all are.

    `ours` is what all ranks saw, `theirs` what the other run saw.
    """
    ours, theirs = list(ours), list(theirs)
    found = _weights(ours, theirs) or _models(ours, theirs)
    return found or _times(ours, theirs) or _losses(ours, theirs)


def other_numbers(ours: Iterable[Seen], theirs: Iterable[Seen]) -> str:
    """The first reduced numbers that are not the same in two runs of one process; or empty."""
    pairs = zip(_of(ours, NUMBERS, ""), _of(theirs, NUMBERS, ""), strict=False)
    for one, other in pairs:
        a, b = one["values"], other["values"]
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, equal_nan=True):
            first, second = (", ".join(f"{v:.5g}" for v in x[:4].tolist()) for x in (a, b))
            return f"At {one['place']}, the ranks reduced to {first}, and one process to {second}."
    return ""


def same_totals(ours: Iterable[Seen], theirs: Iterable[Seen]) -> bool:
    """Whether the counts that were reduced at a line in two steps add up to the same numbers."""
    sums: list[dict[tuple[str, int], Tensor]] = [{}, {}]
    for total, seen in zip(sums, (ours, theirs), strict=True):
        for one in _of(seen, NUMBERS, ""):
            values, key = one["values"], (one["place"], len(one["values"]))
            if torch.equal(values, values.round()):
                total[key] = total.get(key, torch.zeros(len(values))) + values
    return all(torch.equal(sums[0][key], sums[1][key]) for key in sums[0].keys() & sums[1].keys())


def _of(seen: Iterable[Seen], what: str, key: str | None = None) -> list[Seen]:
    return [one for one in seen if one["what"] == what and key in (None, one["key"])]


def _weights(ours: list[Seen], theirs: list[Seen]) -> Doubt | None:
    """The first call of a model whose weights are not the same everywhere."""
    for call in _of(theirs, WEIGHTS):
        others = [other["weights"] for other in _of(ours, WEIGHTS, call["key"])]
        if not any(math.isclose(call["weights"], other, rel_tol=1e-6) for other in others):
            return Doubt(
                f"At {call['place']}, the model has other weights than on the ranks: the step "
                "moves them before this pass, each rank by its own gradient, so one process is no "
                "reference.",
                violated=True,
            )
    return None


def _models(ours: list[Seen], theirs: list[Seen]) -> Doubt | None:
    """The first call of a model that was given other rows. A wrapper may be given more tensors."""
    calls = _of(ours, MODEL)
    if not calls:
        if _same_outputs(ours, theirs):
            return None
        return Doubt("No call of a model with the optimizer's parameters was seen.")
    keys = dict.fromkeys(call["key"] for call in calls)
    for key in dict.fromkeys(call["key"] for call in _of(theirs, MODEL)):
        model = key.split("/")[0]
        got = [call["rows"] for call in _of(theirs, MODEL, key)]
        of_model = [k for k in keys if k.split("/")[0] == model]
        if any(same_rows([s["rows"] for s in _of(ours, MODEL, k)], got) for k in of_model):
            continue
        where = _of(theirs, MODEL, key)[0]["place"]
        why = f"At {where}, the model does not get the samples that it gets on the ranks."
        return Doubt(why, violated=True, of_samples=True)
    for model in dict.fromkeys(key.split("/")[0] for key in keys):
        apart = _inputs_apart([_inputs(side, model) for side in (ours, theirs)])
        if apart or _ragged_apart(ours, theirs, model):
            where = next(call["place"] for call in theirs if call["key"].startswith(f"{model}/"))
            why = f"At {where}, the model gets the rows of one input with other rows of another "
            return Doubt(f"{why}than on the ranks.", violated=True, of_samples=True)
    missing = {key.split("/")[0] for key in keys}
    if missing - {call["key"].split("/")[0] for call in _of(theirs, MODEL)}:
        return Doubt(f"The call of the model at {calls[0]['place']} was not seen in both runs.")
    return None


def _same_outputs(ours: list[Seen], theirs: list[Seen]) -> bool:
    """Whether losses show that outputs are the same, where the script calls no module."""
    keys = {loss["key"] for loss in _of(ours, LOSS)}
    sides = [[_of(side, LOSS, key) for key in sorted(keys)] for side in (ours, theirs)]
    return bool(keys) and all(
        bool(others)
        and _same_values(
            torch.cat([a["out"] for a in losses]), torch.cat([b["out"] for b in others])
        )
        for losses, others in zip(*sides, strict=True)
    )


def _inputs(seen: list[Seen], model: str) -> list[list[Tensor]]:
    """What each input of a model was in each of its calls; those with one row per sample."""
    of_model = [one for one in _of(seen, MODEL) if one["key"].split("/")[0] == model]
    keys = dict.fromkeys(one["key"] for one in of_model)
    calls = [[one["rows"] for one in _of(of_model, MODEL, key)] for key in keys]
    return [one for one in calls if list(map(len, one)) == list(map(len, calls[0]))]


def _ragged_apart(ours: list[Seen], theirs: list[Seen], model: str) -> bool:
    """Whether an input with several rows per sample is in another order than one with one row.

    As of the values of a ragged batch, when its lengths are in the order of the ranks.
    """
    in_order: dict[bool, list[bool]] = {True: [], False: []}
    lengths = None
    for key in dict.fromkeys(one["key"] for one in _of(ours, MODEL)):
        sides = [[one["rows"] for one in _of(side, MODEL, key)] for side in (ours, theirs)]
        if key.split("/")[0] == model and all(sides) and sides[0][0].dtype == sides[1][0].dtype:
            its = list(map(len, sides[0]))
            lengths = lengths or its
            shapes = {one.shape[1:] for side in sides for one in side}
            same = len(shapes) == 1 and torch.equal(torch.cat(sides[0]), torch.cat(sides[1]))
            in_order[its == lengths].append(same)
    return any(in_order[True]) and not all(in_order[False])


def _inputs_apart(sides: list[list[list[Tensor]]]) -> bool:
    """Whether the rows of a model's inputs have come apart. Positions 0, 1, 2, … are no samples."""
    if min(map(len, sides)) < 2 or len(sides[0]) != len(sides[1]):
        return False
    for front in (True, False):
        sums: list[Any] = [0.0, 0.0]
        for at, (ours, theirs) in enumerate(zip(*sides, strict=True)):
            if len({(one.dim(), one.dtype) for one in (*ours, *theirs)}) != 1:
                return False
            cropped = _cropped([*ours, *theirs], 0, front)
            parts = [_projected(one) for one in cropped]
            if all(torch.equal(one, torch.arange(len(one)).double()) for one in parts):
                continue
            size = float(torch.cat(parts).square().mean().sqrt()) or 1.0
            both = (torch.cat(parts[: len(ours)]), torch.cat(parts[len(ours) :]))
            sums = [s + math.e**at * one / size for s, one in zip(sums, both, strict=True)]
        if not isinstance(sums[0], Tensor) or _same_values(*sums):
            return False
    return True


def _times(ours: list[Seen], theirs: list[Seen]) -> Doubt | None:
    """The first layer that gets longer sequences: samples were joined along time."""
    longest = max((layer["length"] for layer in _of(ours, TIME)), default=0)
    for layer in _of(theirs, TIME):
        if layer["length"] > longest:
            return Doubt(
                f"At {layer['place']}, a layer's sequences are longer than on the ranks: its "
                "samples are along the second dimension. Take them from a DataLoader, or use "
                "batch_first.",
                violated=True,
            )
    return None


def _losses(ours: list[Seen], theirs: list[Seen]) -> Doubt | None:
    """The first loss whose targets have come apart from its outputs."""
    for key in dict.fromkeys(loss["key"] for loss in _of(ours, LOSS)):
        sides = [_of(ours, LOSS, key), _of(theirs, LOSS, key)]
        if len({tuple(loss["columns"]) for side in sides for loss in side}) != 1 or not sides[1]:
            continue
        every, kept = ([_pairs(side, only_kept) for side in sides] for only_kept in (False, True))
        if _apart(every[0], every[1]) or _apart(kept[0], kept[1]):
            why = f"At {sides[1][0]['place']}, the targets are not with the outputs that they are "
            return Doubt(f"{why}with on the ranks.", violated=True, of_samples=True)
    return None


def _pairs(calls: list[Seen], only_kept: bool) -> tuple[Tensor, Tensor]:
    """Outputs and targets of some calls; without those that the loss ignores, or with them."""
    out, target, kept = (torch.cat([one[n] for one in calls]) for n in ("out", "target", "kept"))
    return (out[kept], target[kept]) if only_kept else (out, target)


def _apart(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> bool:
    """Whether the outputs are the same, but not the targets that they are with.

    Targets that count 0, 1, 2, … are positions in a batch, which one process makes by itself.
    """
    (out, target), (other, wanted) = ours, theirs
    if torch.equal(wanted, torch.arange(len(wanted)).double()) or not _same_values(out, other):
        return False
    size = float(out.square().mean().sqrt()) or 1.0
    width = float(target.square().mean().sqrt()) or 1.0
    sums = [one / size + math.e * its / width for one, its in (ours, theirs)]
    return not _same_values(sums[0], sums[1])


def other_counts(ours: Iterable[Seen], theirs: Iterable[Seen], world: int, shared: bool) -> str:
    """The first counts that a rank and one process reduced to other numbers.

    One process reduces a 1 to 1, as it has one rank; and of an average of counts it gets W times.
    `shared`: the ranks have the same samples, which their sum counts W times.
    """
    ours, theirs = _of(ours, NUMBERS, ""), _of(theirs, NUMBERS, "")
    if len(ours) != len(theirs):
        return ""
    for one, other in zip(ours, theirs, strict=True):
        a, b = one["values"], other["values"]
        whole = bool((a == a.round()).all() and (b == b.round()).all())
        ranks = torch.equal(a, b * world) and (shared or bool((b <= 1).all()))
        if whole and not (ranks or torch.equal(a, b) or torch.equal(a * world, b)):
            return other_numbers([one], [other])
    return ""


def other_outputs(ours: Iterable[Seen], theirs: Iterable[Seen]) -> str:
    """The line of the first model or loss that computed other numbers in two runs of the same
    samples, in whatever order; or empty. A gradient of other samples may explain it, and padding.
    """
    ours, theirs = list(ours), list(theirs)
    keys = dict.fromkeys((one["what"], one["key"]) for one in ours if one["what"] in (OUTPUT, LOSS))
    for key in keys:
        sides = [_of(side, *key) for side in (ours, theirs)]
        first, second = (torch.cat([o["out"] for o in s] or [torch.zeros(0)]) for s in sides)
        padded = len({tuple(one["columns"]) for side in sides for one in side}) > 1
        if len(first) == len(second) and not padded:
            distance = (first.sort().values - second.sort().values).norm()
            if bool(distance > TOLERANCE * second.norm()):
                return str(sides[0][0]["place"])
    return ""


def same_rows(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether both hold the same rows in any order, along the first or the second dimension.

    Longer rows may go on with padding, at the end or at the beginning. Equal constants are the
    same, however often they are there.
    """
    every = [*ours, *theirs]
    if not theirs or len({one.dim() for one in every}) != 1 or len({t.dtype for t in every}) != 1:
        return False
    for front in (True, False):
        for dim in range(min(2, every[0].dim())):
            cropped = _cropped(every, dim, front)
            lengths = cropped[0].shape
            # What rows of several lengths have beyond the shortest is no padding.
            ragged = {d for d in range(1, len(lengths)) if len({t.shape[d] for t in ours}) > 1}
            equal = set(range(len(lengths))) - ragged - {dim}
            if not all(_only_padding_left(t, lengths[d], d, front) for t in every for d in equal):
                continue  # rows are samples here, and these are fewer
            a, b = cropped[: len(ours)], cropped[len(ours) :]
            first, *others = cropped
            if all(one.shape == first.shape and torch.equal(one, first) for one in others):
                return True
            first, second = (
                torch.cat([_projected(t.transpose(0, dim)) for t in side]) for side in (a, b)
            )
            if _same_values(first, second, every[0].dtype):
                return True
    return False


def _cropped(tensors: Sequence[Tensor], dim: int, front: bool) -> list[Tensor]:
    """All as long as the shortest, in each dimension but `dim`."""
    out = [one.nan_to_num() if one.is_floating_point() else one for one in tensors]
    for other in range(tensors[0].dim()):
        if other != dim:
            length = min(one.shape[other] for one in tensors)
            out = [t.narrow(other, 0 if front else t.shape[other] - length, length) for t in out]
    return out


def _only_padding_left(tensor: Tensor, length: int, dim: int, front: bool) -> bool:
    """Whether all that is beyond a length in a dimension holds one and the same value."""
    rest = tensor.narrow(dim, length if front else 0, tensor.shape[dim] - length).nan_to_num()
    return not rest.numel() or bool((rest == rest.flatten()[0]).all())


def _projected(tensor: Tensor) -> Tensor:
    """A number for each row; rows that differ have different ones."""
    rows = tensor.detach().cpu().double().nan_to_num().flatten(1) if tensor.dim() > 1 else None
    if rows is None:
        return tensor.detach().cpu().double().nan_to_num()
    return rows @ _noise(rows.shape[1])


def _noise(width: int) -> Tensor:
    """On the CPU, whatever device the script has chosen."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, generator=generator, dtype=torch.float64, device="cpu")


def _same_values(ours: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether both hold the same numbers in any order, up to rounding."""
    if len(ours) != len(theirs):
        return False
    ours, theirs = ours.sort().values, theirs.sort().values
    exact = not dtype.is_floating_point
    step = 1e-9 if exact else (64 if dtype.itemsize >= 4 else 4) * torch.finfo(dtype).eps
    size = float(ours.square().mean().sqrt()) if len(ours) else 0.0
    return not bool(((ours - theirs).abs() > step * (size + 1e-30)).any())
