"""Invariants of every data-parallel implementation: checks to import into your own tests.

There are two kinds. The `assert_…` functions inspect a module in the middle of a training run, on
every rank:

    loss.backward(); optimizer.step()
    assert_replicas_agree(model)

The others run a whole implementation on a small problem with a known answer. An implementation is
a callable `wrap(module)`, such as torch's DistributedDataParallel or ten lines around your own
trainer; `labkit.testing.trial` lists its optional methods. These checks, too, run on every rank of
an initialized process group:

    class MyTrainer:
        def __init__(self, module): self.module = module   # and broadcast it from rank 0
        def __call__(self, inputs): return self.module(inputs)
        def finish(self): average_gradients(self.module)   # after backward

    def test_my_trainer_averages():
        run_ranks(lambda: gradients_equal_full_batch(MyTrainer), 3)

`INVARIANTS` lists those that every correct implementation obeys; `violations(wrap)` tries them
all. `communication_overlaps_backward` is not in the list: without overlap, gradients are late but
right.

Run them on two ranks and on three. The sum of two numbers is the same in both orders, so two ranks
hide some mistakes, and a number of ranks that is written into the code is wrong on only one of the
two. Data differ between ranks in every check, because equal data would hide the rest.

If one rank is wrong, each check raises `InvariantError` on *every* rank, so it never leaves the
others waiting. Collectives are compared before they are launched (`labkit.testing.watch`), so
ranks that call different ones do not hang.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy

import torch
import torch.distributed as dist

from labkit.testing.agreement import (
    Gradients,
    InvariantError,
    assert_gradients_agree,
    assert_gradients_equal,
    assert_replicas_agree,
    raise_on_every_rank,
)
from labkit.testing.checking import Device, Invariant, because, invariant
from labkit.testing.overlap import communication_overlaps_backward  # noqa: F401, offered here
from labkit.testing.trial import (
    InterruptedPassError,
    MicroBatch,
    SmallModule,
    TrialModule,
    TwoBuckets,
    Wrap,
    backward_passes,
    draw_batches,
    full_batch_step,
    named_gradients,
    step,
)
from labkit.testing.watch import SameCollectives


def violations(
    wrap: Wrap,
    device: Device = "cpu",
    invariants: Sequence[Invariant] | None = None,
) -> dict[str, InvariantError]:
    """Try every invariant on `wrap`; return those that do not hold, by name.

    `invariants`: try only these; each is decorated with `labkit.testing.checking.invariant`.
    """
    broken = {}
    watched = SameCollectives(late=True)
    for check in INVARIANTS if invariants is None else invariants:
        try:
            check(wrap, device, watched)
        except InvariantError as error:
            broken[check.__name__] = error
        if watched.stuck:  # a rank did not answer, and its connections are closed
            watched.close()
            watched = SameCollectives(late=True)
    watched.close()
    return broken


@invariant
def initial_state_is_broadcast(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """Ranks that build different modules train one model: rank 0's, including buffers.

    One parameter is frozen. It is broadcast, too, and it stays frozen.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = SmallModule(seed=rank, device=device)
    first = SmallModule(seed=0, device=device)
    for each in (module, first):
        each.trunk.bias.requires_grad_(False)
    of_all = draw_batches(world_size, device=device)
    with watched:
        wrapped = wrap(module)
        step(wrapped, module, of_all, rank)
    assert_replicas_agree(module)
    full_batch_step(first, of_all)
    assert_gradients_equal(module, named_gradients(first))


@invariant
def gradients_are_identical(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """After each of three steps, every gradient has the same bits on every rank."""
    _train(wrap, device, watched, look_before=lambda module, _: assert_gradients_agree(module))


@invariant
def replicas_stay_identical(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """After each of three AdamW steps, every parameter has the same bits on every rank."""
    _train(wrap, device, watched, look_after=assert_replicas_agree)


@invariant
def gradients_equal_full_batch(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """In each of three steps, the gradient equals one process's gradient of the whole batch.

    So it does in a step with large gradients, and in one where a rank has a target that is NaN:
    whoever looks for such a step, to skip it, has to find it on every rank.
    """
    _train(wrap, device, watched, look_before=assert_gradients_equal)
    of_all = draw_batches(dist.get_world_size(), device=device)
    large = [[one._replace(targets=one.targets * 1e6) for one in each] for each in of_all]
    *others, [last] = of_all
    nan = [*others, [last._replace(targets=last.targets * torch.nan)]]
    _one_step(wrap, device, watched, [large, nan])


@invariant
def accumulation_equals_full_batch(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """Four micro-batches, with only the last one synchronized, equal one batch; twice in a row."""
    world_size = dist.get_world_size()
    steps = [draw_batches(world_size, 4, seed=seed, device=device) for seed in (1, 2)]
    _one_step(wrap, device, watched, steps)


@invariant
def uneven_items_equal_full_batch(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """Ranks and micro-batches have 1 to 7 items: each item counts once, wherever it is."""
    world_size = dist.get_world_size()
    steps = [draw_batches(world_size, micro, uneven=True, device=device) for micro in (1, 3)]
    _one_step(wrap, device, watched, steps)


@invariant
def clipping_equals_full_batch(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """A gradient clipped to half its norm, or to twice, equals the full batch's gradient, clipped
    in the same way. In the second case nothing is clipped.
    """
    of_all = draw_batches(dist.get_world_size(), device=device)
    oracle = SmallModule(device=device)
    full_batch_step(oracle, of_all)
    norm = torch.stack([p.grad.norm() for p in oracle.parameters()]).norm()
    # torch divides by the norm + 1e-6, so that a gradient of another length, clipped rightly, comes
    # out a little longer or shorter.
    for factor in (0.5, 2):
        max_norm = factor * float(norm)
        _one_step(wrap, device, watched, [of_all], max_norm=max_norm, tolerance=1e-5)


@invariant
def missing_counts_as_zeros(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """A gradient that is missing on some ranks counts as zeros there.

    There are four cases. Rank 0 and the other ranks lack different branches of equal shapes. All
    ranks but 0 lack two branches. A branch is used in the first micro-batch only. All ranks but 0
    lack the layer in the first bucket. torch's DDP needs find_unused_parameters=True.
    """
    world_size = dist.get_world_size()
    data = draw_batches(world_size, device=device)
    twice = draw_batches(world_size, 2, device=device)
    steps = [
        _taking(data, [("a", "c"), *[("b", "c")] * (world_size - 1)]),
        _taking(data, [("a", "b", "c"), *[("a",)] * (world_size - 1)]),
        [[first, last._replace(take=("a", "b"))] for first, last in twice],
    ]
    _one_step(wrap, device, watched, steps)
    first_bucket_missing = _taking(data, [("a", "b"), *[("a",)] * (world_size - 1)])
    _one_step(wrap, device, watched, [first_bucket_missing] * 2, module=TwoBuckets(device))


@invariant
def none_stays_none(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """If no rank used a parameter in this step, its grad stays None and AdamW does not change it.

    The parameter was used in the previous step, so it has momentum that a gradient of zeros would
    apply. torch's DDP needs find_unused_parameters=True.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = SmallModule(device=device)
    everything = draw_batches(world_size, device=device)
    without_c = _taking(everything, [("a", "b")] * world_size)
    error = None
    with watched:
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
        moved = float((parameter - before[name]).detach().abs().max())
        if arrived[name] is not None or moved:
            grad = "None" if arrived[name] is None else "a tensor"
            error = error or InvariantError(
                "none_stays_none",
                rank,
                f"{name}.grad",
                f"{grad}; AdamW moved the parameter by {moved:.3g}",
                "None, and a parameter that did not move",
                "zeros stand in for a gradient that no rank has: momentum and weight decay are "
                "applied where a single process would skip. Find out which parameters some rank "
                "used (one all-reduce of flags); leave the others' gradients None.",
            )
    raise_on_every_rank(error)


@invariant
def collectives_match(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """All ranks launch the same collectives in the same order, and no two gradients are mixed up.

    Every rank runs the module's branches in a different order, so gradients appear in different
    orders. The tensors have different shapes, equal shapes, or a bucket of their own.
    """
    world_size = dist.get_world_size()
    data = draw_batches(world_size, device=device)
    rounds = [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")]
    of_all_shapes = _taking(data, [rounds[rank % 3] for rank in range(world_size)])
    swaps = [("a", "b", "c"), ("b", "a", "c")]
    of_equal_shapes = _taking(data, [swaps[rank % 2] for rank in range(world_size)])
    buckets = [("a", "b"), ("b", "a")]
    of_buckets = _taking(data, [buckets[rank % 2] for rank in range(world_size)])
    cause = (
        "a gradient was combined with another parameter's of the same shape: buckets are launched "
        "in the order in which they fill on this rank. Launch in one order, fixed for all ranks."
    )
    _one_step(wrap, device, watched, [of_all_shapes], cause=cause)
    _one_step(wrap, device, watched, [of_equal_shapes], cause=cause)
    _one_step(wrap, device, watched, [of_buckets] * 2, cause=cause, module=TwoBuckets(device))


@invariant
def survives_an_exception(wrap: Wrap, device: Device, watched: SameCollectives) -> None:
    """After a forward or backward pass that raised on all ranks, the next step is right.

    The exception is caught, the gradients are set to None, and training continues, like a loop
    that skips a batch after running out of memory. After a *backward* that raised, an
    implementation may refuse the next step with a RuntimeError on every rank, as torch's DDP does.
    It must not be silently wrong. The check also tries a forward pass without a backward.
    """
    for fails_in in ("forward", "backward", "nothing"):
        _interrupted_run(wrap, device, watched, fails_in)


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


def _train(
    wrap: Wrap,
    device: Device,
    watched: SameCollectives,
    look_before: Callable[[SmallModule, Gradients], None] | None = None,
    look_after: Callable[[SmallModule], None] | None = None,
) -> None:
    """Three steps of the implementation and of the oracle, compared around the optimizer's step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = SmallModule(device=device)
    oracle = deepcopy(module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, oracle)]
    with watched:
        wrapped = wrap(module)
    for number in range(3):
        of_all = draw_batches(world_size, seed=number, device=device)
        with watched:
            step(wrapped, module, of_all, rank)
        full_batch_step(oracle, of_all)
        if look_before:
            look_before(module, named_gradients(oracle))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if look_after:
            look_after(module)


def _one_step(
    wrap: Wrap,
    device: Device,
    watched: SameCollectives,
    steps: Sequence[list[list[MicroBatch]]],
    max_norm: float | None = None,
    cause: str | None = None,
    module: TrialModule | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Each of `steps` gives the oracle's gradients, with one wrapped module and no optimizer."""
    module = module or SmallModule(device=device)
    oracle = deepcopy(module)
    with watched:
        wrapped = wrap(module)
    for of_all in steps:
        module.zero_grad()
        oracle.zero_grad()
        with watched:
            step(wrapped, module, of_all, dist.get_rank(), max_norm)
        full_batch_step(oracle, of_all, max_norm)
        with because(cause):
            assert_gradients_equal(module, named_gradients(oracle), tolerance=tolerance)


def _taking(
    of_all: list[list[MicroBatch]], takes: Sequence[tuple[str, ...]]
) -> list[list[MicroBatch]]:
    """The same data, with rank r going through the branches `takes[r]`."""
    return [
        [batch._replace(take=take) for batch in one]
        for one, take in zip(of_all, takes, strict=True)
    ]


def _interrupted_run(wrap: Wrap, device: Device, watched: SameCollectives, fails_in: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = SmallModule(device=device)
    oracle = deepcopy(module)
    data = [draw_batches(world_size, seed=seed, device=device) for seed in (1, 2, 3)]
    refused = False
    with watched:
        wrapped = wrap(module)
        step(wrapped, module, data[0], rank)
        module.zero_grad()
        if fails_in == "nothing":
            wrapped(data[1][rank][0].inputs)
        else:
            module.fails_in = fails_in
            with suppress(InterruptedPassError):
                backward_passes(wrapped, module, data[1], rank)
            module.fails_in = None
            while watched.launched_late:  # all of it has been sent before the next step
                watched.launched_late[0].wait()
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
    with because(
        "bookkeeping of the pass that raised (a count of gradients, a list of handles) was still "
        "there in the next one. Reset it when a pass begins, or refuse to go on.",
    ):
        assert_gradients_equal(module, named_gradients(oracle))
