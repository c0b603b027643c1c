"""Loss terms: which function, over how many items, and by which factor its gradient is scaled.

The gradient that arrives at a loss function's output is the product of all later factors. They are
the division by accumulation steps, the multiplication by the world size, and the reduction, if the
function does not reduce. Divided by the count of items, the product is the weight of one item.
"""

import re
import sys
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_doctor.facts.fingerprints import checksum
from ddp_doctor.facts.places import expression, place
from ddp_doctor.facts.types import ScalingFact, TermFact
from ddp_doctor.observe.patching import Args, Kwargs, Patches
from ddp_doctor.observe.recorder import Recorder, ranks

FUNCTIONS = [
    name
    for name, function in vars(F).items()
    if isinstance(function, FunctionType) and "reduction" in signature(function).parameters
    if name != "linear_cross_entropy"  # it calls another one
]
ONE_PER_ROW = (
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
    *("cosine_embedding_loss", "triplet_margin_loss"),
)
MAX_TERMS = 200
NODE = "ddp_doctor"  # in a node's metadata: the number of the term that is its output


def install(recorder: Recorder, patches: Patches) -> None:
    of = _Terms(recorder)
    for name in FUNCTIONS:
        patches.observe(F, name, of.enter, partial(of.loss, name), of.on, failed=of.abandoned)
    for owner in (torch.Tensor, torch):
        for kind in ("mean", "sum", "nanmean", "nansum"):
            after = partial(of.reduced, kind.removeprefix("nan"))
            patches.observe(owner, kind, after=after, when=of.on)
    for owner, names, sign in (
        (torch.Tensor, ("__truediv__", "__itruediv__", "div", "div_", "divide"), "/"),
        (torch.Tensor, ("__mul__", "__rmul__", "__imul__", "mul", "mul_", "multiply"), "*"),
        (torch, ("div", "divide", "true_divide"), "/"),
        (torch, ("mul", "multiply"), "*"),
    ):
        for name in names:
            after = partial(of.scaled, sign, name == "__rmul__")
            patches.observe(owner, name, after=after, when=of.on)


class _Terms:
    """The loss terms of one process: the functions that make them, and what scales them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.depth = 0  # of loss functions that call one another
        self.arrived = recorder.session.guard(_arrived)

    def on(self) -> bool:
        return self.recorder.on and not self.recorder.session.over

    def enter(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether this loss function was not called by another one."""
        self.depth += 1
        return self.depth == 1

    def abandoned(self, error: BaseException) -> None:
        self.depth = max(0, self.depth - 1)

    def loss(self, name: str, first: bool, result: Any, args: Args, kwargs: Kwargs) -> None:
        """A loss function has returned."""
        self.depth = max(0, self.depth - 1)
        if not first or not self.on():
            return
        if isinstance(result, Tensor) and result.requires_grad and not result.is_meta:
            at = place(sys._getframe(1))
            self.watch(_counted(name, args, kwargs) | {"place": at, "loss": True}, result)

    def reduced(self, kind: str, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        """A sum or a mean has returned: a loss, if it is a number."""
        source = args[0] if args else kwargs.get("input")
        if (
            self.depth
            or not isinstance(result, Tensor)
            or not isinstance(source, Tensor)
            or not result.requires_grad
            or result.is_meta
            or result.numel() != 1
            or source.dim() == 0
        ):
            return
        term = {
            "function": kind,
            "reduction": kind,
            "count": _unmasked(source) if kind == "sum" else source.numel(),
            "rows": source.shape[0],
            "place": place(sys._getframe(1)),
            "loss": False,
            "over_parameters": bool(source.is_leaf),
        }
        self.watch(term, result)

    def watch(self, term: dict[str, Any], output: Tensor) -> None:
        """Remember a term, and sum the gradients that arrive at its output."""
        recorder = self.recorder
        if len(recorder.terms) >= MAX_TERMS:
            del recorder.terms[0]
        # A reference to the node would keep the whole forward alive. Nodes cannot be referenced
        # weakly; but each has a dictionary that lives as long as the node.
        node = output.grad_fn
        recorder.terms_made += 1
        term["node"] = recorder.terms_made
        if node is not None:
            term["node"] = node.metadata.setdefault(NODE, recorder.terms_made)
        term |= {"hit": False, "hits": 0.0}
        output.register_hook(partial(self.arrived, term))
        recorder.terms.append(term)

    def scaled(
        self,
        sign: str,
        reflected: bool,
        token: Any,
        result: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        """A tensor with a gradient was multiplied or divided by a number without."""
        window = self.recorder.window
        if self.depth or len(args) < 2 or self.recorder.in_backward:
            return
        loss, other, left = args[0], args[1], reflected
        if isinstance(loss, Tensor) and not loss.requires_grad and isinstance(other, Tensor):
            loss, other, left = other, loss, not left
            if sign == "/":
                return
        if not isinstance(loss, Tensor) or not isinstance(result, Tensor):
            return
        value = _number(other)
        if value is None or not result.requires_grad or len(window["scaling"]) >= 100:
            return
        if loss.numel() != 1 and value not in self.by_world:
            return  # of losses that are no number yet, only a factor of the ranks is of interest
        frame = sys._getframe(1)
        at, text = place(frame), expression(frame)
        if loss.numel() != 1 and any(one["place"] == at for one in window["scaling"]):
            return
        operand = re.split(r"[*/]=?", text)[0 if left else -1]
        fact = ScalingFact(op=sign, value=value, text=text, operand=operand.strip(), place=at)
        window["scaling"].append(fact)

    @property
    def by_world(self) -> tuple[float, ...]:
        """The factors by which a loss depends on the number of ranks; none with one rank."""
        return (float(ranks()), 1 / ranks()) if ranks() > 1 else ()


def _arrived(term: dict[str, Any], gradient: Tensor | None) -> None:
    """A gradient has reached a term's output; None if the loss does not use the output."""
    if gradient is None:
        return
    gradient = gradient.detach()
    term["hit"] = True
    term["hits"] += float(gradient.double().sum())
    if gradient.numel() == 1:
        return
    used = gradient[gradient != 0]
    term["count"] = used.numel()
    if used.numel():
        term["spread"] = [float(used.abs().min()), float(used.abs().max())]


def _number(factor: Any) -> float | None:
    """A factor without a gradient, as a number."""
    if isinstance(factor, Tensor):
        if factor.requires_grad or factor.numel() != 1:
            return None
        try:
            factor = factor.detach().item()
        except RuntimeError:
            return None  # inside vmap there is no number to read
    return float(factor) if isinstance(factor, int | float) else None


def fact_of(term: dict[str, Any]) -> TermFact:
    """What the journal keeps of a term."""
    kept = {key: term[key] for key in TermFact.__annotations__ if key in term}
    return cast(TermFact, kept | {"factor": term["hits"]})


def _counted(name: str, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """How many items a loss function counts, from its arguments."""
    values = dict(zip(signature(getattr(F, name)).parameters, args, strict=False)) | kwargs
    reduction = values.get("reduction", "mean")
    if values.get("size_average") is not None or values.get("reduce") is not None:
        reduction = F._Reduction.legacy_get_string(values.get("size_average"), values.get("reduce"))
    source = next(value for value in values.values() if isinstance(value, Tensor))
    target = values.get("target")
    rows = source.shape[0] if source.dim() else 1
    term: dict[str, Any] = {"function": name, "reduction": reduction}
    term |= {"count": source.numel(), "rows": rows, "shape": list(source.shape)[:4]}
    if name in ("cross_entropy", "nll_loss") and isinstance(target, Tensor):
        term |= _of_classes(values, source, target, reduction)
    elif name == "kl_div" and reduction == "batchmean":
        term |= {"count": rows, "reduction": "mean"}
    elif name == "ctc_loss":
        lengths = values.get("target_lengths")
        term["count"] = term["rows"] = len(lengths) if hasattr(lengths, "__len__") else rows
    elif name in ONE_PER_ROW:
        term["count"] = rows
    term["input"] = checksum(source, 1 << 20)
    if isinstance(target, Tensor):
        term["target"] = checksum(target, 1 << 20)
    return term


def _of_classes(
    values: dict[str, Any], source: Tensor, target: Tensor, reduction: str
) -> dict[str, Any]:
    """What a loss over classes counts: the targets that it does not ignore, or their weights."""
    term: dict[str, Any] = {"rows": target.shape[0] if target.dim() else 1}
    if target.is_floating_point():
        count = source.numel() // source.shape[1 if source.dim() > 1 else 0]
        return term | {"count": count}
    kept = target != values.get("ignore_index", -100)
    term["count"] = int(kept.sum())
    weight = values.get("weight")
    if isinstance(weight, Tensor) and reduction == "mean":
        term["count"] = float(weight.detach()[target[kept]].sum())
    if source.dim() == 2 and target.dim() == 1:
        term["square"] = _diagonal(source, target)
    return term


def _diagonal(logits: Tensor, target: Tensor) -> list[int] | None:
    """[rows, columns, ascending] if every row has a target of its own, as in a contrastive loss.

    `ascending` is 1 if the targets are n, n + 1, …; a batch of classes is rarely like that.
    """
    rows, columns = logits.shape
    if rows < 2 or columns < rows or columns % rows or target.unique().numel() < rows:
        return None
    first = int(target[0])
    ascending = torch.arange(first, first + rows, device=target.device, dtype=target.dtype)
    return [rows, columns, int(torch.equal(target, ascending))]


def _unmasked(source: Tensor) -> int:
    """How many elements a 0/1 mask left, if the tensor is a product with one; else all of them."""
    node = source.grad_fn
    if node is not None and node.name() == "MulBackward0":
        for side in ("_saved_other", "_saved_self"):
            try:
                mask = getattr(node, side, None)
            except RuntimeError:  # its backward has run: a sum for the log
                return source.numel()
            if not isinstance(mask, Tensor) or mask.requires_grad or not mask.dim():
                continue
            if bool(((mask == 0) | (mask == 1)).all()):
                return int(mask.expand_as(source).sum())
    return source.numel()
