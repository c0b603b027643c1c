"""A test for one's own repository: one optimizer step's gradient, in one process and on W ranks.

def test_my_training_step_averages_over_all_items():
    ddp_doctor.check_step(build_model, compute_loss, batches, world_size=2)
"""

import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BuildModel = Callable[[], nn.Module]
ComputeLoss = Callable[[nn.Module, Any], Tensor]
Wrap = Callable[[nn.Module], nn.Module]
# Seconds that the ranks may take to start, even if `timeout` is shorter: on a busy machine, to
# import torch takes longer than a step.
START_WITHIN = 60.0


@dataclass(frozen=True)
class ParameterComparison:
    """One parameter: the ranks' gradient against the whole batch's. `ratio` is of the norms."""

    name: str
    ratio: float
    cosine: float


@dataclass(frozen=True)
class StepReport:
    """What `check_step` measured. `factor` names a common factor, if there is one."""

    ratio: float
    cosine: float
    parameters: list[ParameterComparison]
    factor: str | None
    ranks_agree: bool

    @property
    def worst(self) -> ParameterComparison:
        """The parameter furthest from the whole batch's gradient."""
        return max(
            self.parameters,
            key=lambda comparison: abs(comparison.ratio - 1) + abs(comparison.cosine - 1),
        )

    def __str__(self) -> str:
        worst = self.worst
        named = f" (= {self.factor})" if self.factor else ""
        agree = "" if self.ranks_agree else " The ranks' gradients differ from each other."
        return (
            f"gradient of the ranks / gradient of the whole batch: ratio {self.ratio:.4f}{named}, "
            f"cosine {self.cosine:.4f}; worst parameter {worst.name}: ratio {worst.ratio:.4f}, "
            f"cosine {worst.cosine:.4f}.{agree}"
        )


def check_step(
    build_model: BuildModel,
    compute_loss: ComputeLoss,
    batches: Sequence[Any],
    world_size: int = 2,
    accumulate: int = 1,
    *,
    whole_batch: Callable[[Sequence[Any]], Any] | None = None,
    reference_loss: ComputeLoss | None = None,
    wrap: Wrap = DistributedDataParallel,
    tolerance: float = 1e-3,
    seed: int = 0,
    timeout: float = 120.0,
    raises: bool = True,
    start_method: Literal["spawn", "forkserver"] = "spawn",
) -> StepReport:
    """Compare one optimizer step's gradient on `world_size` ranks with one process's.

    `batches` holds world_size × accumulate batches; rank r takes accumulate of them, from
    r × accumulate. `compute_loss(model, batch)` returns what each micro-batch back-propagates, with
    every division that your loop does; it may call torch.distributed. The reference is one process
    with `whole_batch(batches)`, by default all tensors concatenated along dimension 0, and
    `reference_loss`, by default `compute_loss`, without a wrapper.

    Each rank is a process of its own (gloo, CPU): both functions have to be importable, as for a
    DataLoader with workers. All micro-batches but the last run under `no_sync` where there is one.
    If you have many such tests, pass `start_method="forkserver"`, and let your conftest.py call
    `multiprocessing.set_forkserver_preload(["torch._dynamo"])`. The ranks then share one import of
    torch. An environment variable that is read while a module is imported keeps the value that it
    had when the first such test started.

    Unless `raises` is false, raises AssertionError with the factor's name if ratio or cosine are
    off by more than `tolerance` for any parameter, or if the ranks' gradients differ. Raises
    ValueError if the number of batches does not fit, or if `start_method` is not one of the two.
    Raises RuntimeError if a rank fails, if not all ranks have joined after 60 s (or `timeout`, if
    longer), or if one has no gradient `timeout` seconds after that. Cost: two optimizer steps and
    the start of W processes, about 4 s with "spawn".
    """
    if len(batches) != world_size * accumulate:
        raise ValueError(
            f"{len(batches)} batches for {world_size} ranks × {accumulate} micro-batches: "
            f"pass {world_size * accumulate}."
        )
    if start_method not in ("spawn", "forkserver"):
        why = ": a fork of a process that has run a backward may hang"
        raise ValueError(
            f'start_method is "spawn" or "forkserver", not {start_method!r}'
            f"{why if start_method == 'fork' else ''}. Pass one of these two."
        )
    whole = (whole_batch or concatenated)(batches)
    wanted = _reference(build_model, reference_loss or compute_loss, whole, seed)
    with tempfile.TemporaryDirectory(prefix="ddp-doctor-") as folder:
        work = (build_model, compute_loss, batches, wrap)
        got = _on_ranks(start_method, folder, world_size, accumulate, seed, timeout, *work)
    report = _compared(wanted, got, world_size, accumulate, len(batches))
    worst = report.worst
    close = abs(worst.ratio - 1) <= tolerance and abs(worst.cosine - 1) <= tolerance
    if raises and not (close and report.ranks_agree):
        raise AssertionError(f"check_step: {report}")
    return report


def concatenated(batches: Sequence[Any]) -> Any:
    """The batches as one: tensors along dimension 0; tuples, lists and dicts part by part."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches)) if first.dim() else torch.stack(list(batches))
    if isinstance(first, dict):
        return {key: concatenated([batch[key] for batch in batches]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(concatenated(list(part)) for part in zip(*batches, strict=True))
    raise TypeError(f"batches of {type(first).__name__}: pass whole_batch= to combine them")


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        .detach()
        .clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _reference(
    build_model: BuildModel, loss: ComputeLoss, batch: Any, seed: int
) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model()
        owns = not dist.is_initialized()
        folder = tempfile.TemporaryDirectory(prefix="ddp-doctor-")
        try:
            if owns:  # a loss that calls torch.distributed works in a group of one
                store = dist.FileStore(str(Path(folder.name) / "store"), 1)
                dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            loss(model, batch).backward()
        finally:
            if owns and dist.is_initialized():
                dist.destroy_process_group()
            folder.cleanup()
    return _gradients(model)


def _on_ranks(
    method: str, folder: str, world: int, accumulate: int, seed: int, timeout: float, *work: Any
) -> list[dict[str, Tensor]]:
    context: Any = multiprocessing.get_context(method)
    # A fork server keeps the environment of the moment when it started.
    environment = dict(os.environ) if method == "forkserver" else None
    processes = [
        context.Process(
            target=_rank,
            args=(rank, world, accumulate, seed, timeout, folder, environment, *work),
            daemon=True,
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        gone, late = _wait(processes, Path(folder), timeout)
    finally:
        for process in processes:
            process.kill()  # what a rank had to say is in its file
        for process in processes:
            process.join()
    # A rank may have ended by itself since they were asked: its exit code is not that of the kill.
    by_itself = [rank for rank in range(world) if processes[rank].exitcode != -signal.SIGKILL]
    _raise_what_failed(Path(folder), world, {*gone, *by_itself}, late)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]


def _wait(processes: Sequence[Any], folder: Path, timeout: float) -> tuple[list[int], str]:
    """Wait until every rank has written its gradient, one has failed or ended, or time is up.

    Returns the ranks that have ended without a file, and what to say if time is up.
    """
    world = len(processes)
    until = time.monotonic() + max(timeout, START_WITHIN)
    all_started = False
    while time.monotonic() <= until:
        if not all_started and len(list(folder.glob("*.started"))) == world:
            all_started, until = True, time.monotonic() + timeout
        # Asked before the files are looked for: a rank that has ended writes no more of them.
        ended = [rank for rank in range(world) if not processes[rank].is_alive()]
        left = _without_gradient(folder, world)
        gone = [rank for rank in left if rank in ended and not (folder / f"{rank}.error").exists()]
        if gone or not left or any(folder.glob("*.error")):
            return gone, ""
        time.sleep(0.02)
    if not all_started:
        return [], (
            "and not all ranks had joined the process group after "
            f"{max(timeout, START_WITHIN):g} s. If the machine is that busy, pass timeout= with "
            "more than that."
        )
    return [], (
        f"within {timeout:g} s. If compute_loss calls torch.distributed, let every rank make the "
        "same calls; if it is slow, pass a longer timeout=."
    )


def _raise_what_failed(folder: Path, world: int, ended: set[int], late: str) -> None:
    """Raise RuntimeError unless every rank has written its gradient."""
    left = _without_gradient(folder, world)
    # If a rank fails, its connections close, and others fail, too: the first error is the cause.
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    failure = f"rank {errors[0].stem} failed:\n{errors[0].read_text()}" if errors else ""
    failed = {int(path.stem) for path in errors}
    if gone := [rank for rank in left if rank in ended and rank not in failed]:
        raise RuntimeError(  # the others may have failed for that reason
            f"check_step: {_ranks(gone)} ended without a gradient: killed, or by os._exit. Check "
            f"memory, and build_model and compute_loss for os._exit. {failure}".rstrip()
        )
    if errors:
        raise RuntimeError(f"check_step: {failure}")
    if left:
        raise RuntimeError(f"check_step: {_ranks(left)} wrote no gradient {late}")


def _without_gradient(folder: Path, world: int) -> list[int]:
    return [rank for rank in range(world) if not (folder / f"{rank}.pt").exists()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _rank(
    rank: int,
    world: int,
    accumulate: int,
    seed: int,
    timeout: float,
    folder: str,
    environment: dict[str, str] | None,
    build_model: BuildModel,
    compute_loss: ComputeLoss,
    batches: Sequence[Any],
    wrap: Wrap,
) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(Path(folder) / "store"), world)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world,
            # Longer than the parent waits: its message says more.
            timeout=timedelta(seconds=timeout + START_WITHIN),
        )
        (Path(folder) / f"{rank}.started").touch()
        torch.manual_seed(seed)
        mine = batches[rank * accumulate : (rank + 1) * accumulate]
        gradients = _backward(build_model(), compute_loss, mine, wrap)
        torch.save(gradients, Path(folder) / f"{rank}.part")
        os.replace(Path(folder) / f"{rank}.part", Path(folder) / f"{rank}.pt")
    except BaseException:
        part = Path(folder) / f"{rank}.error-part"
        part.write_text(traceback.format_exc())
        os.replace(part, Path(folder) / f"{rank}.error")
        raise SystemExit(1) from None
    # A rank that exits now would close connections that another rank may still use. The parent
    # kills all ranks once each has written its gradient, or one has failed, or time is up.
    threading.Event().wait()


def _backward(
    module: nn.Module, compute_loss: ComputeLoss, batches: Sequence[Any], wrap: Wrap
) -> dict[str, Tensor]:
    """One rank's micro-batches; all but the last under `no_sync` where there is one."""
    model = wrap(module)
    for at, batch in enumerate(batches, start=1):
        if at < len(batches) and hasattr(model, "no_sync"):
            with model.no_sync():
                compute_loss(model, batch).backward()
        else:
            compute_loss(model, batch).backward()
    return _gradients(module)


def _end_with_the_parent() -> None:
    """End this process when its parent has ended, even in the middle of a step."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _compared(
    wanted: dict[str, Tensor],
    got: list[dict[str, Tensor]],
    world: int,
    accumulate: int,
    batches: int,
) -> StepReport:
    agree = all(
        torch.equal(got[0][name], gradient[name]) for gradient in got[1:] for name in wanted
    )
    parameters = [
        ParameterComparison(name, *_ratio_and_cosine(got[0][name], gradient))
        for name, gradient in wanted.items()
    ]
    ratio, cosine = _ratio_and_cosine(
        torch.cat([got[0][name].flatten() for name in wanted]),
        torch.cat([gradient.flatten() for gradient in wanted.values()]),
    )
    factor = _named(ratio, world, accumulate) if abs(cosine - 1) < 1e-3 else None
    return StepReport(ratio, cosine, parameters, factor, agree)


def _ratio_and_cosine(ours: Tensor, other: Tensor) -> tuple[float, float]:
    ours, other = ours.double().flatten(), other.double().flatten()
    first, second = float(ours.norm()), float(other.norm())
    if not second or not first:
        same = first == second
        return (1.0 if same else (math.inf if first else 0.0)), (1.0 if same else 0.0)
    return first / second, float(ours @ other) / (first * second)


def _named(ratio: float, world: int, accumulate: int) -> str | None:
    names = {"1": 1.0, "W": world, "1/W": 1 / world}
    if accumulate > 1:
        k = accumulate
        names |= {"K": k, "1/K": 1 / k, "K·W": k * world, "1/(K·W)": 1 / (k * world)}
        names |= {"K/W": k / world, "W/K": world / k}
    for name, value in names.items():
        if abs(ratio - value) <= 1e-3 * value:
            return None if name == "1" else name
    return None
