"""Do the ranks agree? Assertions to call during a training run, on any module.

    loss.backward()
    average_gradients(model)
    assert_gradients_agree(model)
    optimizer.step()
    assert_replicas_agree(model)

Every rank must call them. They raise `InvariantError` on every rank, even if only one rank is
wrong, so a failed assertion never leaves other ranks waiting.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.compare import Comparison, flatten, ratio_and_cosine

Gradients = Mapping[str, Tensor | None]


@dataclass(eq=False)
class InvariantError(AssertionError):
    """What does not hold, where, the two numbers, and the likely cause.

    `comparison` holds the ratio and the cosine of all gradients to the true ones, if gradients were
    compared with true ones; otherwise it is None.
    """

    invariant: str
    rank: int
    where: str
    found: str
    expected: str
    cause: str
    comparison: Comparison | None = None

    def __post_init__(self) -> None:
        self.args = tuple(vars(self).values())  # with which it is unpickled

    def __str__(self) -> str:
        return (
            f"{self.invariant} does not hold on rank {self.rank}: {self.where}\n"
            f"  found:    {self.found}\n"
            f"  expected: {self.expected}\n"
            f"  likely cause: {self.cause}"
        )


def assert_replicas_agree(module: nn.Module, buffers: bool = True) -> None:
    """Parameters and buffers are bitwise equal on every rank.

    After a forward pass, batch norm's running statistics differ between ranks, in torch's DDP too:
    pass `buffers=False` then. Costs one broadcast per tensor.
    """
    tensors: dict[str, Tensor | None] = dict(module.named_parameters())
    tensors |= dict(module.named_buffers()) if buffers else {}
    _assert_same_bits(
        "assert_replicas_agree",
        tensors,
        "the ranks did not start from the same weights, or did not apply the same gradient in "
        "every step since. Broadcast parameters and buffers from rank 0 at construction, and check "
        "the gradients with assert_gradients_agree.",
    )


def assert_gradients_agree(module: nn.Module) -> None:
    """Each gradient is bitwise equal on every rank, or None on every rank.

    Call it after gradients are combined and before the optimizer's step. Costs one broadcast per
    gradient.
    """
    _assert_same_bits(
        "assert_gradients_agree",
        {f"{name}.grad": p.grad for name, p in module.named_parameters() if p.requires_grad},
        "this gradient was not combined (the forward pass bypassed the wrapper, or a hook "
        "processed another tensor), or the ranks sum in different orders.",
    )


def assert_gradients_equal(module: nn.Module, true: Gradients, tolerance: float = 1e-9) -> None:
    """On every rank the gradients of `module` are the `true` ones (by name; None counts as zeros).

    Equal means: the error of each parameter's gradient has a norm of at most `tolerance` times the
    norm of the whole true gradient. 1e-9 suits float64; use 1e-5 for float32. An element that is
    NaN or infinite in one has to be so in both. Each trainable parameter needs an entry in `true`,
    and each gradient in `true` needs a trainable parameter.
    """
    if error := _names_error(module, true):
        raise_on_every_rank(error)
    found, wanted = {}, {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            zeros = torch.zeros_like(parameter)
            grad, right = parameter.grad, true[name]
            found[name] = zeros if grad is None else _dense(grad)
            wanted[name] = zeros if right is None else _dense(right).to(zeros.device)
    missed = {name: float(_error(found[name], wanted[name]).norm()) for name in found}
    worst = max(missed, key=lambda name: math.inf if math.isnan(missed[name]) else missed[name])
    allowed = tolerance * float(flatten(wanted.values()).nan_to_num(0, 0, 0).norm())
    error = None
    if not missed[worst] <= allowed:  # neither is a NaN
        comparison = None
        if allowed and any(bool(gradient.any()) for gradient in found.values()):
            comparison = ratio_and_cosine(list(found.values()), list(wanted.values()))
        error = InvariantError(
            "assert_gradients_equal",
            dist.get_rank(),
            f"{worst}.grad",
            f"norm {float(found[worst].norm()):.6g} (over all parameters: "
            f"{comparison or 'zeros or None'})",
            f"norm {float(wanted[worst].norm()):.6g} (the full batch's: ratio 1, cosine 1)",
            _cause(comparison, dist.get_world_size()),
            comparison,
        )
    raise_on_every_rank(error)


def raise_on_every_rank(error: InvariantError | None) -> None:
    """Raise the lowest rank's `error` on every rank; return if no rank has one.

    Costs one all-reduce of one byte, and one all-gather of the errors if a rank has one. Over NCCL
    the byte is on the GPU; that branch has not been run yet.
    """
    backend = dist.get_backend()
    device = "cuda" if "nccl" in backend and "gloo" not in backend else "cpu"
    failed = torch.tensor([error is not None], dtype=torch.uint8, device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if not failed:
        return
    errors: list[InvariantError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    raise next(one for one in errors if one is not None)


def _assert_same_bits(invariant: str, tensors: Mapping[str, Tensor | None], cause: str) -> None:
    kinds: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(kinds, {n: _kind(t) for n, t in tensors.items()})
    for elsewhere, there in enumerate(kinds):  # every rank has all of it: all raise the same
        for name in {**there, **kinds[0]}:
            here, at_rank_0 = (one.get(name, "no such tensor") for one in (there, kinds[0]))
            if here != at_rank_0:
                raise InvariantError(
                    invariant, elsewhere, name, here, f"{at_rank_0}, as on rank 0", cause
                )
    error = None
    for name in kinds[0]:  # in one order on all ranks
        if (tensor := tensors[name]) is None:
            continue
        mine = _dense(tensor)
        rank_0s = mine.clone()
        dist.broadcast(_bits(rank_0s), 0)
        if error is None and not torch.equal(_bits(mine), _bits(rank_0s)):
            found, expected = _difference(mine, rank_0s)
            error = InvariantError(invariant, dist.get_rank(), name, found, expected, cause)
    raise_on_every_rank(error)


def _names_error(module: nn.Module, true: Gradients) -> InvariantError | None:
    """The error unless `true` names the trainable parameters, and no others except with None."""
    every = dict(module.named_parameters(remove_duplicate=False))  # `true` may name tied ones twice
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    given = (name for name, right in true.items() if right is not None)
    wrong = {
        **{n: "a trainable parameter" for n in trainable if n not in true},
        **{n: "a frozen parameter" for n in given if n in every and not every[n].requires_grad},
        **{n: "no parameter of this name" for n in true if true[n] is not None and n not in every},
    }
    if trainable and not wrong:
        return None
    where, found = next(iter(wrong.items()), ("the module", "no trainable parameter"))
    return InvariantError(
        "assert_gradients_equal",
        dist.get_rank(),
        f"{where}.grad" if wrong else where,
        found,
        "one true gradient per trainable parameter, by its name",
        "the implementation froze or replaced a parameter, or `true` belongs to another module. "
        "Leave parameters that are frozen on purpose out of `true`.",
    )


def _error(found: Tensor, right: Tensor) -> Tensor:
    """Elementwise; 0 where both are NaN, or the same infinity."""
    return torch.where((found == right) | (found.isnan() & right.isnan()), 0, found - right)


def _difference(mine: Tensor, rank_0s: Tensor) -> tuple[str, str]:
    """What is found, and what is expected, if the bits of the two differ."""
    bits = (_bits(mine) != _bits(rank_0s)).view(mine.numel(), -1)
    precise = torch.complex128 if mine.is_complex() else torch.float64  # counts, flags: numbers
    mine, rank_0s = mine.to(precise), rank_0s.to(precise)
    largest = float((mine - rank_0s).abs().max())
    by = f"by {largest:.3g} at most" if largest else "in their bits only"
    found = f"{int(bits.any(dim=1).sum())} of {mine.numel()} elements differ from rank 0's, {by}"
    return (
        f"{found} (norm {float(mine.norm()):.17g})",
        f"rank 0's bits (norm {float(rank_0s.norm()):.17g})",
    )


def _kind(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"a tensor of {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).contiguous()


def _bits(tensor: Tensor) -> Tensor:
    """As bytes: NaN equals NaN, and 0.0 differs from -0.0."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).view(torch.uint8)


def _cause(comparison: Comparison | None, world_size: int) -> str:
    if comparison is None:
        return "a gradient is missing, or exists where there should be none: did backward run?"
    ratio, cosine = comparison
    if math.isnan(cosine):
        return "a gradient is not finite: an overflow (sum before division in half precision?)."
    if cosine < 1 - 1e-6:
        return (
            "a direction bug, which no positive factor repairs: some gradients were not combined, "
            "or were combined with another parameter's, or some samples count more than others."
        )
    if world_size > 1 and abs(ratio / world_size - 1) < 1e-3:
        return (
            f"a scale bug: {world_size} times too large on {world_size} ranks, a sum where an "
            "average is needed, or a loss with a local denominator multiplied by the world size."
        )
    if world_size > 1 and abs(ratio * world_size - 1) < 1e-3:
        return (
            f"a scale bug: {world_size} times too small on {world_size} ranks, divided by the "
            "world size twice, or a loss with a global denominator not multiplied by it."
        )
    if abs(ratio - 1) < 1e-6:
        return (
            "right on the whole, wrong in a small part: rounding, or one small parameter left out."
        )
    return "a scale bug: one factor (micro-batches? ranks? samples?) too many or too few."
