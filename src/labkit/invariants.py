"""What must hold of every data-parallel implementation: checks to import into your own tests.

Two kinds. The `assert_…` functions look at a module in the middle of a training run, on every rank:

    loss.backward(); optimizer.step()
    assert_replicas_agree(model)

The others put a whole implementation through a small problem whose answer is known. An
implementation is a callable `wrap(module)`, such as torch's DistributedDataParallel or ten lines
around your own trainer (`labkit.trial` says what it may have). They too run on every rank of an
initialized process group:

    def work(rank):
        gradients_equal_full_batch(MyTrainer)

    run_ranks(work, 3)

`INVARIANTS` lists those that every correct implementation obeys; `violations(wrap)` tries them all.
`communication_overlaps_backward` stands aside: without overlap a gradient is late, but right.

Run them on three ranks at least: any two numbers have the same sum in both orders, so two ranks
hide some mistakes. Data differ between ranks in all of them, since equal data hide the rest.

Each raises `InvariantError` on *every* rank, also if one rank only is wrong: a failed check never
leaves the other ranks waiting. Nor does an implementation whose ranks call different collectives:
they are compared before they are launched (`labkit.watch`).
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from labkit.agreement import (
    Gradients,
    InvariantError,
    assert_gradients_agree,
    assert_gradients_equal,
    assert_replicas_agree,
    raise_on_every_rank,
)
from labkit.trial import (
    Batch,
    InterruptedPassError,
    SmallModule,
    Wrap,
    full_batch_step,
    named_gradients,
    step,
)
from labkit.trial import backward as trial_backward
from labkit.trial import batches as trial_batches
from labkit.watch import CollectiveMismatchError, RecordedCollectives, SameCollectives

__all__ = [
    "INVARIANTS",
    "InvariantError",
    "assert_gradients_agree",
    "assert_gradients_equal",
    "assert_replicas_agree",
    "communication_overlaps_backward",
    "violations",
]

Device = torch.device | str
Invariant = Callable[..., None]


def violations(
    wrap: Wrap,
    device: Device = "cpu",
    invariants: Sequence[Callable[..., None]] | None = None,
) -> dict[str, InvariantError]:
    """Try every invariant, or those given, on `wrap`; return those that do not hold, by name."""
    broken = {}
    for invariant in INVARIANTS if invariants is None else invariants:
        try:
            invariant(wrap, device)
        except InvariantError as violation:
            broken[invariant.__name__] = violation
    return broken


def initial_state_is_broadcast(wrap: Wrap, device: Device = "cpu") -> None:
    """Ranks that build different modules train one model: rank 0's, buffers included."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = SmallModule(seed=rank, device=device)
    first = SmallModule(seed=0, device=device)
    of_all = trial_batches(world_size, device=device)
    with _watched("initial_state_is_broadcast"):
        wrapped = wrap(module)
        step(wrapped, module, of_all, rank)
    with _named("initial_state_is_broadcast"):
        assert_replicas_agree(module)
        full_batch_step(first, of_all)
        assert_gradients_equal(module, named_gradients(first))


def gradients_are_identical(wrap: Wrap, device: Device = "cpu") -> None:
    """After each of three steps every gradient has the same bits on every rank."""
    _train(
        "gradients_are_identical",
        wrap,
        device,
        look_before=lambda module, _: assert_gradients_agree(module),
    )


def replicas_stay_identical(wrap: Wrap, device: Device = "cpu") -> None:
    """After each of three AdamW steps every parameter has the same bits on every rank."""
    _train("replicas_stay_identical", wrap, device, look_after=assert_replicas_agree)


def gradients_equal_full_batch(wrap: Wrap, device: Device = "cpu") -> None:
    """In each of three steps the gradient is that of one process with the whole batch."""
    _train("gradients_equal_full_batch", wrap, device, look_before=assert_gradients_equal)


def accumulation_equals_full_batch(wrap: Wrap, device: Device = "cpu") -> None:
    """Four micro-batches, of which the last is synchronized, equal one batch; twice in a row."""
    _one_step(
        "accumulation_equals_full_batch",
        wrap,
        device,
        [trial_batches(dist.get_world_size(), 4, seed=seed, device=device) for seed in (1, 2)],
    )


def uneven_items_equal_full_batch(wrap: Wrap, device: Device = "cpu") -> None:
    """Ranks and micro-batches with 1 to 7 items: each item counts once, wherever it lies."""
    _one_step(
        "uneven_items_equal_full_batch",
        wrap,
        device,
        [
            trial_batches(dist.get_world_size(), micro, uneven=True, device=device)
            for micro in (1, 3)
        ],
    )


def clipping_equals_full_batch(wrap: Wrap, device: Device = "cpu") -> None:
    """A gradient clipped to half its norm is the full batch's gradient, clipped likewise."""
    of_all = trial_batches(dist.get_world_size(), device=device)
    oracle = SmallModule(device=device)
    full_batch_step(oracle, of_all)
    norm = torch.stack([p.grad.norm() for p in oracle.parameters()]).norm()
    _one_step("clipping_equals_full_batch", wrap, device, [of_all], max_norm=float(norm) / 2)


def missing_counts_as_zeros(wrap: Wrap, device: Device = "cpu") -> None:
    """A gradient missing on some ranks counts as zeros there.

    Three cases, in one run: rank 0 lacks one branch and the others lack another, of equal shapes;
    all but rank 0 lack two branches; a branch is used in the first micro-batch only. torch's DDP
    asks for find_unused_parameters=True.
    """
    world_size = dist.get_world_size()
    data = trial_batches(world_size, device=device)
    twice = trial_batches(world_size, 2, device=device)
    _one_step(
        "missing_counts_as_zeros",
        wrap,
        device,
        [
            _taking(data, [("a", "c"), *[("b", "c")] * (world_size - 1)]),
            _taking(data, [("a", "b", "c"), *[("a",)] * (world_size - 1)]),
            [[first, last._replace(take=("a", "b"))] for first, last in twice],
        ],
    )


def none_stays_none(wrap: Wrap, device: Device = "cpu") -> None:
    """A parameter that no rank used in this step keeps grad None, and AdamW leaves it alone.

    It was used in the step before, so that there is momentum which a gradient of zeros would apply.
    torch's DDP asks for find_unused_parameters=True.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = SmallModule(device=device)
    everything = trial_batches(world_size, device=device)
    without_c = _taking(everything, [("a", "b")] * world_size)
    violation = None
    with _watched("none_stays_none"):
        wrapped = wrap(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
        step(wrapped, module, everything, rank)
        optimizer.step()
        optimizer.zero_grad()
        unused = {n: p for n, p in module.named_parameters() if n.startswith("branches.c")}
        before = {name: parameter.detach().clone() for name, parameter in unused.items()}
        step(wrapped, module, without_c, rank)
        arrived = {name: parameter.grad for name, parameter in unused.items()}
        optimizer.step()
        for name, parameter in unused.items():
            if arrived[name] is not None or not torch.equal(parameter, before[name]):
                moved = float((parameter - before[name]).detach().abs().max())
                violation = InvariantError(
                    "none_stays_none",
                    rank,
                    f"{name}.grad",
                    f"{'None' if arrived[name] is None else 'a tensor'}; "
                    f"AdamW moved the parameter by {moved:.3g}",
                    "None, and a parameter that did not move",
                    "zeros stand in for a gradient that no rank has: momentum and weight decay "
                    "are applied where a single process would skip. Find out which parameters "
                    "some rank used (one all-reduce of flags); leave the others' gradients None.",
                )
                break
    raise_on_every_rank(violation)


def collectives_match(wrap: Wrap, device: Device = "cpu") -> None:
    """All ranks launch the same collectives in the same order, and no two gradients are mixed up.

    Although every rank goes through the branches in another order, so that gradients appear in
    another order too; once with tensors of different shapes, once with tensors of equal ones.
    """
    orders = [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")]
    world_size = dist.get_world_size()
    data = trial_batches(world_size, device=device)
    turned = [orders[rank % 3] for rank in range(world_size)]
    swapped = [[("a", "b", "c"), ("b", "a", "c")][rank % 2] for rank in range(world_size)]
    cause = (
        "a gradient was combined with another parameter's of the same shape: buckets are launched "
        "in the order in which they fill on this rank. Launch in one order, fixed for all ranks."
    )
    _one_step("collectives_match", wrap, device, [_taking(data, turned)], cause=cause)
    _one_step("collectives_match", wrap, device, [_taking(data, swapped)], cause=cause)


def survives_an_exception(wrap: Wrap, device: Device = "cpu") -> None:
    """After a forward or backward pass that raised on all ranks, the next step is right.

    The exception is caught, the gradients are set to None, training goes on, as in a loop that
    skips a batch for which memory did not suffice. After a *backward* that raised, an
    implementation may instead refuse the next step with a RuntimeError, on every rank: torch's
    DDP does. Wrong in silence it may not be. Also tried: a forward pass for which no backward
    ever comes.
    """
    for fails_in in ("forward", "backward", "nothing"):
        _interrupted_run(wrap, device, fails_in)


def communication_overlaps_backward(wrap: Wrap, device: Device = "cpu") -> None:
    """Collectives are launched during backward, and backward goes on meanwhile.

    Looked at in the third step (torch's DDP arranges its buckets in the first), on a stack of
    four Linear(512, 512), 4 MiB. The second half is tried by holding the last rank back at its
    first gradient: the others must reach their last one while their collective still waits for
    that rank. No clock decides, except that a blocked implementation is given up after three
    seconds.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(device)
    watch = RecordedCollectives()
    backward = _HeldBack(
        module, watch, rank, world_size
    )  # its hooks come before the implementation's
    inputs = torch.randn(2, 512, generator=torch.Generator().manual_seed(rank)).to(device)
    with _watched("communication_overlaps_backward"):
        wrapped = wrap(module)
        for _ in range(2):
            wrapped(inputs).square().mean().backward()
            getattr(wrapped, "finish", _nothing)()
            module.zero_grad()
    with watch:
        loss = wrapped(inputs).square().mean()
        backward.begins()
        loss.backward()
        getattr(wrapped, "finish", _nothing)()
    raise_on_every_rank(backward.error())


INVARIANTS: tuple[Invariant, ...] = (
    initial_state_is_broadcast,
    gradients_are_identical,
    gradients_equal_full_batch,
    replicas_stay_identical,
    accumulation_equals_full_batch,
    uneven_items_equal_full_batch,
    clipping_equals_full_batch,
    missing_counts_as_zeros,
    none_stays_none,
    collectives_match,
    survives_an_exception,
)


class _HeldBack:
    """Notes when gradients arrive, and holds the last rank back at its first one."""

    def __init__(
        self, module: nn.Module, watch: RecordedCollectives, rank: int, world_size: int
    ) -> None:
        self.watch, self.rank, self.world_size = watch, rank, world_size
        self.launched_before = -1  # collectives launched when backward began; -1: not begun
        self.launched_at: dict[str, int] = {}  # and when each gradient arrived
        self.waited_in_vain = False
        self.parameters = dict(module.named_parameters())
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))
        path: list[str] = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(path)
        self.store = dist.FileStore(os.path.join(path[0], "store"), world_size)

    def begins(self) -> None:
        self.launched_before = len(self.watch.launched)

    def _arrived(self, name: str) -> None:
        if self.launched_before < 0:
            return
        if self.rank == self.world_size - 1 and not self.launched_at:
            others = [f"rank {other} has all" for other in range(self.rank)]
            try:
                self.store.wait(others, timedelta(seconds=3))
            except RuntimeError:  # of FileStore; other stores raise its subclass DistStoreError
                self.waited_in_vain = True
        self.launched_at[name] = len(self.watch.launched)
        if len(self.launched_at) == len(self.parameters):
            self.store.set(f"rank {self.rank} has all", "yes")

    def error(self) -> InvariantError | None:
        last = list(self.launched_at)[-1]
        if self.launched_at[last] == self.launched_before:
            return InvariantError(
                "communication_overlaps_backward",
                self.rank,
                f"{last}.grad, the last to arrive",
                "no collective had been launched when it arrived",
                "at least one",
                "communication begins when backward has ended: one bucket for everything, or an "
                "all-reduce after backward. Launch from a hook, bucket by bucket.",
            )
        if self.waited_in_vain:
            return InvariantError(
                "communication_overlaps_backward",
                self.rank,
                "the other ranks' backward",
                "waited, in a collective, for this rank's share",
                "went on to its last gradient while the collective was under way",
                "the hook waits for what it launched. Launch with async_op=True, keep the handle, "
                "and wait for all of them when backward has ended.",
            )
        return None


@contextmanager
def _named(invariant: str, cause: str | None = None) -> Iterator[None]:
    """Errors of the assertions within are reported under the name of `invariant`."""
    try:
        yield
    except InvariantError as e:
        raise InvariantError(
            invariant, e.rank, e.where, e.found, e.expected, cause or e.cause, e.comparison
        ) from None


@contextmanager
def _watched(invariant: str) -> Iterator[None]:
    """Runs an implementation: mismatched collectives, and whatever it raises, break `invariant`."""
    try:
        with SameCollectives():
            yield
    except CollectiveMismatchError as mismatch:
        rank = dist.get_rank()
        raise InvariantError(
            invariant,
            rank,
            f"collective number {mismatch.number}",
            f"this rank {mismatch.went[rank]}; "
            + "; ".join(f"rank {r} {w}" for r, w in enumerate(mismatch.went) if r != rank),
            "the same collective on every rank",
            "what a rank launches depends on its own data: gradients that are None are skipped, or "
            "buckets are launched when they are full on this rank. Fix one order for all ranks.",
        ) from None
    except InvariantError:
        raise
    except Exception as error:
        raise InvariantError(
            invariant,
            dist.get_rank(),
            "the training step",
            f"it raised {type(error).__name__}: {error}",
            "a step",
            "the implementation does not support what is asked for here: see the exception.",
        ) from error


def _train(
    invariant: str,
    wrap: Wrap,
    device: Device,
    look_before: Callable[[SmallModule, Gradients], None] | None = None,
    look_after: Callable[[SmallModule], None] | None = None,
) -> None:
    """Three steps beside the oracle's, looked at before and after the optimizer's step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = SmallModule(device=device)
    oracle = deepcopy(module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, oracle)]
    with _watched(invariant):
        wrapped = wrap(module)
    for number in range(3):
        of_all = trial_batches(world_size, seed=number, device=device)
        with _watched(invariant):
            step(wrapped, module, of_all, rank)
        full_batch_step(oracle, of_all)
        if look_before:
            with _named(invariant):
                look_before(module, named_gradients(oracle))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if look_after:
            with _named(invariant):
                look_after(module)


def _one_step(
    invariant: str,
    wrap: Wrap,
    device: Device,
    steps: Sequence[list[list[Batch]]],
    max_norm: float | None = None,
    cause: str | None = None,
) -> None:
    """Each of `steps` gives the oracle's gradients, by one wrapped module, without optimizer."""
    module = SmallModule(device=device)
    oracle = deepcopy(module)
    with _watched(invariant):
        wrapped = wrap(module)
    for of_all in steps:
        module.zero_grad()
        oracle.zero_grad()
        with _watched(invariant):
            step(wrapped, module, of_all, dist.get_rank(), max_norm)
        full_batch_step(oracle, of_all, max_norm)
        with _named(invariant, cause):
            assert_gradients_equal(module, named_gradients(oracle))


def _taking(of_all: list[list[Batch]], takes: Sequence[tuple[str, ...]]) -> list[list[Batch]]:
    """The same data, of which rank r's go through the branches `takes[r]`."""
    return [
        [batch._replace(take=take) for batch in one]
        for one, take in zip(of_all, takes, strict=True)
    ]


def _interrupted_run(wrap: Wrap, device: Device, fails_in: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = SmallModule(device=device)
    oracle = deepcopy(module)
    data = [trial_batches(world_size, seed=seed, device=device) for seed in (1, 2, 3)]
    refused = False
    with _watched("survives_an_exception"):
        wrapped = wrap(module)
        step(wrapped, module, data[0], rank)
        module.zero_grad()
        if fails_in == "nothing":
            wrapped(data[1][rank][0].inputs)
        else:
            module.fails_in = fails_in
            with suppress(InterruptedPassError):
                trial_backward(wrapped, module, data[1], rank)
            module.fails_in = None
        module.zero_grad()
        try:
            step(wrapped, module, data[2], rank)
        except RuntimeError:
            if fails_in != "backward":
                raise
            refused = True
    full_batch_step(oracle, data[2])
    if refused:
        return
    with _named(
        "survives_an_exception",
        "bookkeeping of the pass that raised (a count of gradients, a list of handles) was still "
        "there in the next one. Reset it when a pass begins, or refuse to go on.",
    ):
        assert_gradients_equal(module, named_gradients(oracle))


def _nothing() -> None:
    """Stands in for a `finish` that an implementation does not have."""
