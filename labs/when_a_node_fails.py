"""Interrupted training: a rank is killed, a rank gets stuck, or a whole node fails.

Start it with torchrun; on two nodes, run this on each of them:

    torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 1 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:PORT labs/when_a_node_fails.py --checkpoint runs/resume.pt --kill 2@7

MiniDDP trains a small model; every batch is drawn from the seed, the step, and the rank. Rank 0
prints each step, writes a checkpoint every few steps, and finally prints a hash of the weights,
which is the same on every rank.

--kill, --stick, and --lose-node take effect only in a run that began at step 0, not in a resumed
one. With --max-restarts 1, the run above ends with the hash of an uninterrupted run.

Without --checkpoint nothing is written, and a restart begins at step 0. Nodes without a shared
disk have a folder each; the newest checkpoint of any rank counts.
"""

import argparse
import hashlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

from labkit.launch.arguments import explained_by, parse_arguments, positive


class Moment(NamedTuple):
    """A rank and the step at which something happens to it."""

    rank: int
    step: int

    @classmethod
    def parse(cls, text: str) -> Self:
        rank, _, step = text.partition("@")
        return cls(int(rank), int(step))


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of model and data (default 0)")
    parser.add_argument("--steps", type=int, default=12, help="number of steps (default 12)")
    parser.add_argument(
        "--checkpoint", type=Path, help="the checkpoint file (default: none is written)"
    )
    parser.add_argument(
        "--every", type=positive, default=4, help="steps between checkpoints (default 4)"
    )
    faults = parser.add_mutually_exclusive_group()
    moment = {"type": Moment.parse, "metavar": "RANK@STEP"}
    faults.add_argument("--kill", **moment, help="kill this rank in the middle of this step")
    faults.add_argument("--stick", **moment, help="block this rank in this step")
    faults.add_argument(
        "--lose-node", **moment, help="kill every process of this rank's node, including its agent"
    )
    parser.add_argument(
        "--forget-optimizer",
        action="store_true",
        help="leave the optimizer's state out of the checkpoint",
    )
    parser.add_argument(
        "--rebuild-buckets",
        action="store_true",
        help="rebuild the buckets after the first step of each attempt, as DDP does by default",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60,
        help="time limit of one all-reduce, in seconds (default 60)",
    )
    ARGUMENTS = parse_arguments(parser)

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.launch.lab import Place, join_ranks
from miniddp import MiniDDP
from missing_ranks import report_missing_ranks


def draw_batch(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """(16, 32) inputs and (16,) classes, without a generator's state that would need restoring."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * step + rank)
    inputs = torch.randn(16, 32, generator=generator)
    return inputs, inputs[:, :10].argmax(dim=1)


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )


def hash_of(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def happen(arguments: argparse.Namespace, place: Place, step: int) -> None:
    """Carry out the fault of this step. All ranks have finished the previous one."""
    if arguments.kill and step == arguments.kill.step:
        dist.barrier()
        if place.rank == arguments.kill.rank:
            os.kill(os.getpid(), signal.SIGKILL)
    if arguments.stick and step == arguments.stick.step and place.rank == arguments.stick.rank:
        time.sleep(3600)
    if arguments.lose_node and step == arguments.lose_node.step:
        nodes: list[int] = [0] * place.world_size
        dist.all_gather_object(nodes, int(os.environ["GROUP_RANK"]))
        if nodes[place.rank] == nodes[arguments.lose_node.rank]:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the file completely or not at all, even if this process or the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # or a machine that loses power keeps a name without contents
    unfinished.replace(path)


def newest_checkpoint(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint of any rank, the same on every rank; None if no rank has one.

    Exits on every rank, with the name of the file, if a rank cannot read its file.
    """
    rank, steps = dist.get_rank(), [None] * dist.get_world_size()
    found, step = None, -1
    try:
        if path.exists():
            found = torch.load(path, map_location="cpu", weights_only=True)
            step = found["step"]
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        step = (
            f"rank {rank} cannot read {path} ({type(error).__name__}: {error}). Move it away to "
            "start from step 0."
        )
    dist.all_gather_object(steps, step)
    if unreadable := [text for text in steps if isinstance(text, str)]:
        sys.exit(unreadable[0])
    source = steps.index(max(steps))
    handed = [found if rank == source else None]
    dist.broadcast_object_list(handed, src=source)
    return handed[0]


def train_with_faults(arguments: argparse.Namespace, place: Place) -> nn.Module:
    def say(text: str) -> None:
        if place.rank == 0:
            print(text, flush=True)

    module = build_model(arguments.seed).to(place.device)
    saved = (newest_checkpoint(arguments.checkpoint) if arguments.checkpoint else None) or {}
    first = saved.get("step", 0)
    if saved:
        module.load_state_dict(saved["model"])
        say(f"resumed at step {first}")
    # With find_unused_parameters the initial buckets stay. Otherwise they are rebuilt after the
    # first step of every (re)start, and other buckets mean another order of addition.
    # A separate group for the averages: all ranks have joined by now, so its timeout can be short.
    group = dist.new_group(timeout=timedelta(seconds=arguments.timeout))
    stay = not arguments.rebuild_buckets
    wrapped = MiniDDP(module, process_group=group, find_unused_parameters=stay)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    if "optimizer" in saved:
        optimizer.load_state_dict(saved["optimizer"])

    with report_missing_ranks() as note:
        for step in range(first, arguments.steps):
            note(f"step {step}: its batch")
            inputs, classes = (
                part.to(place.device) for part in draw_batch(arguments.seed, step, place.rank)
            )
            loss = nn.functional.cross_entropy(wrapped(inputs), classes)
            if not saved:
                happen(arguments, place, step)
            note(f"step {step}: backward")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say(f"step {step:2d}  loss of rank 0 {loss.item():.4f}")
            done = step + 1
            if arguments.checkpoint and done % arguments.every == 0 and place.rank == 0:
                state = {"step": done, "model": module.state_dict()}
                if not arguments.forget_optimizer:
                    state["optimizer"] = optimizer.state_dict()
                save_checkpoint(arguments.checkpoint, state)
    return module


def main(arguments: argparse.Namespace) -> None:
    with join_ranks() as place:
        module = train_with_faults(arguments, place)
        hashes = [""] * place.world_size
        dist.all_gather_object(hashes, hash_of(module))
        if place.rank == 0:
            print(f"weights {hashes[0]} on {hashes.count(hashes[0])} of {place.world_size} ranks")
    if len(set(hashes)) > 1:
        raise SystemExit("the replicas differ")


if __name__ == "__main__":
    main(ARGUMENTS)
