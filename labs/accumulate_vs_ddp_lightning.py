"""The forum program with two Lightning Trainers, in four versions: each of its two bugs in or out.

    python labs/accumulate_vs_ddp_lightning.py
    python labs/accumulate_vs_ddp_lightning.py --version as-asked
    python labs/accumulate_vs_ddp_lightning.py --version both-fixed --devices 2 --accumulate 2

The program accumulates four samples on one device, then trains with DDP on four devices, one
sample each. Its versions:

  as-asked          the first Trainer has strategy="ddp"; the data are drawn before the seed
  seed-moved        the seed is set before the data are drawn
  strategy-removed  the first Trainer has no strategy
  both-fixed        both

Without --version all four run, and one table compares them. The exit code is 1 if the two columns
of a version that is run and has both fixes differ.

This is a plain script, not one for torchrun: Lightning's strategy "ddp" runs the script again, once
per additional device. A process that sets no seed before it draws uses --unseeded plus its rank, so
that the numbers can be repeated; "--unseeded none" draws truly unseeded data.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
import warnings
from typing import NamedTuple

from labkit.launch.arguments import explained_by, positive
from labkit.launch.memory import available_memory, gc_paused

MEMORY_OF_A_DEVICE = 300e6  # bytes: a process that Lightning starts imports it anew
SEED = 42
THREADS_SAMPLES = 4
VERSIONS = {  # name: (the first Trainer has strategy="ddp", the seed comes before the data)
    "as-asked": (True, False),
    "seed-moved": (True, True),
    "strategy-removed": (False, False),
    "both-fixed": (False, True),
}


def refuse_torchrun() -> None:
    """Exit with an explanation if torchrun has started this script."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ.get("RANK", "0") != "0":
            # torchrun stops all ranks when one fails: let rank 0 fail first, with its message.
            time.sleep(30)
        sys.exit(
            "Lightning starts its processes itself. Run this script without torchrun: "
            "python labs/accumulate_vs_ddp_lightning.py"
        )


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    refuse_torchrun()
    parser = explained_by(__doc__)
    parser.add_argument("--version", choices=VERSIONS, help="run only this one, with more detail")
    parser.add_argument(
        "--devices", type=positive, default=4, help="of the second Trainer (default 4)"
    )
    parser.add_argument(
        "--accumulate", type=positive, default=1, help="its batches per step (default 1)"
    )
    parser.add_argument("--seed", type=int, default=SEED, help=f"default {SEED}")
    parser.add_argument(
        "--unseeded",
        type=lambda text: None if text == "none" else int(text),
        default=1000,
        help='stands in for a missing seed (default 1000); "none" for no seed at all',
    )
    ARGUMENTS = parser.parse_args()

# Once, for the forks to share.
with gc_paused():
    import pytorch_lightning as pl
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.utils.data import DataLoader, TensorDataset

    from labkit.launch import leave_group
    from labkit.scenarios.toy_captioner import (
        PRINTED,
        ToyCaptioner,
        draw_toy_data,
        gradient_norms,
    )
    from labkit.tables import Cell, table


class Seen(NamedTuple):
    """What one process recorded. Norms map a parameter's name to its gradient's norm."""

    local_rank_left: str | None  # LOCAL_RANK between the two Trainers
    accumulated: dict[str, float]
    after_each_backward: list[float]  # encoder.weight, in the first Trainer
    printed: list[str]  # by the second Trainer
    samples: list[int]  # that the second Trainer's sampler gave to this process
    trainer_world_size: int
    group_size: int
    ddp: dict[str, float]
    at_batch_end: float  # encoder.weight in on_train_batch_end, after the optimizer step


class GradientPrinter(pl.LightningModule):
    """The toy captioner, trained by Lightning, with a record of its gradients' norms."""

    def __init__(self) -> None:
        super().__init__()
        self.captioner = ToyCaptioner()
        self.printed: list[str] = []
        self.after_each_backward: list[float] = []
        self.norms: dict[str, float] = {}
        self.at_batch_end = 0.0
        self.group_size = 1

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.printed.append(f"GPU {self.global_rank}: batch_idx: {batch_idx}")
        return self.captioner(*batch)

    def on_after_backward(self) -> None:
        self.after_each_backward.append(gradient_norms(self.captioner)["encoder.weight"])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms = gradient_norms(self.captioner)

    def on_train_batch_end(self, *_: object) -> None:
        self.at_batch_end = gradient_norms(self.captioner)["encoder.weight"]
        self.group_size = dist.get_world_size() if dist.is_initialized() else 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def run_both_trainers(first_ddp: bool, seed_first: bool, given: argparse.Namespace) -> list[Seen]:
    """Run both Trainers in this process, and return what each process of the second one saw.

    Lightning starts the second Trainer's other processes by running this script again, so every
    process calls this function. Each of them returns the whole list, in the order of ranks.
    """
    _silence()
    data = _draw(seed_first, given)

    pl.seed_everything(given.seed, workers=True, verbose=False)
    first = GradientPrinter()
    strategy = "ddp" if first_ddp else "auto"
    trainer = _trainer(devices=1, strategy=strategy, accumulate_grad_batches=len(data))
    trainer.fit(first, DataLoader(data, batch_size=1))
    local_rank_left = os.environ.get("LOCAL_RANK")

    pl.seed_everything(given.seed, workers=True, verbose=False)
    second = GradientPrinter()
    trainer = _trainer(
        devices=given.devices, strategy="ddp", accumulate_grad_batches=given.accumulate
    )
    trainer.fit(second, DataLoader(data, batch_size=1))

    seen = Seen(
        local_rank_left=local_rank_left,
        accumulated=first.norms,
        after_each_backward=first.after_each_backward,
        printed=second.printed,
        samples=list(trainer.train_dataloader.sampler),
        trainer_world_size=trainer.world_size,
        group_size=second.group_size,
        ddp=second.norms,
        at_batch_end=second.at_batch_end,
    )
    return _gather(seen)


def _draw(seed_first: bool, given: argparse.Namespace) -> TensorDataset:
    """Without a seed, process r seeds with `given.unseeded + r`; None is truly unseeded."""
    if seed_first:
        pl.seed_everything(given.seed, workers=True, verbose=False)
    elif given.unseeded is not None:
        torch.manual_seed(given.unseeded + int(os.environ.get("LOCAL_RANK", "0")))
    return draw_toy_data(given.devices * given.accumulate)


def _trainer(**options: object) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _gather(seen: Seen) -> list[Seen]:
    everyone: list[Seen] = [seen] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    leave_group()
    return everyone


def _silence() -> None:
    # Lightning reports GPUs, tips, and workers on stderr; only failures matter here.
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def run_version(version: str, arguments: argparse.Namespace) -> list[Seen]:
    # What Lightning's further processes are started with.
    own = {"version": version, **{k: v for k, v in vars(arguments).items() if k != "version"}}
    sys.argv[1:] = [f"--{name}={str(value).lower()}" for name, value in own.items()]
    return run_both_trainers(*VERSIONS[version], arguments)


def run_versions(arguments: argparse.Namespace) -> dict[str, list[Seen]]:
    """Each version in a process of its own, two at a time where memory holds them."""
    # Every version changes its process's environment. A fork shares the import of Lightning.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    needed = 2 * arguments.devices * MEMORY_OF_A_DEVICE
    at_once = 2 if available_memory() > needed else 1
    with multiprocessing.get_context(method).Pool(at_once, maxtasksperchild=1) as pool:
        found = pool.starmap(run_version, [(v, arguments) for v in VERSIONS], chunksize=1)
    return dict(zip(VERSIONS, found, strict=True))


def summary(found: dict[str, list[Seen]]) -> str:
    """Which processes the second Trainer had, both columns of norms, and when to read them."""
    rows: list[list[Cell]] = []
    for version, seen in found.items():
        zero = seen[0]
        gpus = "GPU 0" if len(seen) == 1 else f"GPU 0 … {len(seen) - 1}"
        printed = f"{gpus}: batch_idx: {' '.join(str(i) for i in range(len(zero.printed)))}"
        left = zero.local_rank_left or "not set"
        rows.append([version, left, zero.trainer_world_size, zero.group_size, printed])
    headers = ["version", "LOCAL_RANK left", "trainer.world_size", "group size", "prints"]
    processes = table(headers, rows)
    rows = []
    for version, seen in found.items():
        rows.append([version, "accumulated", *seen[0].accumulated.values()])
        # Averages that the thread did not print have three digits: one of them is 0.16095000, whose
        # fourth would depend on the processor.
        digits = 4 if version == "both-fixed" else 3
        rows.append(["", "DDP", *(f"{norm:.{digits}f}" for norm in seen[0].ddp.values())])
    norms = table(["norm on rank 0", "", *found["as-asked"][0].ddp], rows)
    return "\n\n".join([processes, norms, "In the version both-fixed:\n" + moments(seen)])


def moments(seen: list[Seen]) -> str:
    """Where the second Trainer's samples went, and what encoder.weight's gradient was when."""
    samples = "; ".join(" ".join(map(str, s.samples)) for s in seen)
    after = " ".join(f"{norm:.4f}" for norm in seen[0].after_each_backward)
    return (
        f"samples of ranks 0 … {len(seen) - 1}: {samples}\n"
        f"encoder.weight after each backward of the first Trainer: {after}\n"
        f"encoder.weight in on_train_batch_end of the second: {seen[0].at_batch_end:.4f}"
    )


def detail(seen: list[Seen]) -> str:
    """What each process of one version did."""
    zero = seen[0]
    lines = [line for s in seen for line in s.printed]
    lines += [
        f"LOCAL_RANK after the first Trainer: {zero.local_rank_left or 'not set'}",
        f"second Trainer: trainer.world_size {zero.trainer_world_size}, "
        f"size of the group that averages {zero.group_size}",
        moments(seen),
    ]
    rows = [
        [name, *(norm for s in seen for norm in (s.accumulated[name], s.ddp[name]))]
        for name in zero.ddp
    ]
    headers = [f"{what} {rank}" for rank in range(len(seen)) for what in ("accumulated", "DDP")]
    return "\n".join(lines) + "\n\n" + table(["norm on rank", *headers], rows)


def disagreement(seen: list[Seen], arguments: argparse.Namespace) -> str | None:
    """Why the corrected program is not right; None if it is."""
    for rank, s in enumerate(seen):
        for name, norm in s.ddp.items():
            if not abs(norm - s.accumulated[name]) <= 1e-6:  # a NaN is not
                return f"rank {rank}, {name}: accumulated {s.accumulated[name]}, DDP {norm}"
            samples = arguments.devices * arguments.accumulate
            the_threads = arguments.seed == SEED and samples == THREADS_SAMPLES
            if the_threads and f"{norm:.4f}" != f"{PRINTED[name]:.4f}":
                return f"rank {rank}, {name}: {norm}, and the thread printed {PRINTED[name]}"
    return None


def main(arguments: argparse.Namespace) -> None:
    if arguments.version:
        found = {arguments.version: run_version(arguments.version, arguments)}
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(detail(found[arguments.version]), flush=True)
    else:
        found = run_versions(arguments)
        print(summary(found), flush=True)
    if "both-fixed" in found and (why := disagreement(found["both-fixed"], arguments)):
        sys.exit(f"The corrected program does not agree with itself. {why}")


if __name__ == "__main__":
    main(ARGUMENTS)
