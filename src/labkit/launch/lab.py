"""What a lab under torchrun needs: join the ranks, leave together, find the worst value."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from labkit.launch.fork_server import schedule_as_batch
from labkit.launch.guard import die_with_parent

# Long enough for any lab's slowest rank. torch's own is half an hour.
TIMEOUT = timedelta(minutes=5)


class Place(NamedTuple):
    """The rank, the world size, and the device of this process."""

    rank: int
    world_size: int
    device: torch.device


@contextlib.contextmanager
def join_ranks() -> Iterator[Place]:
    """Join the ranks that torchrun started, on one or several nodes; leave them together at the
    end.

    A collective that takes longer than five minutes raises RuntimeError. The environment variable
    LABKIT_DEVICE chooses the device (`choose_devices`). Exits with an explanation if torchrun did
    not start the script, or if that device is missing. The process ends if torchrun's agent does.
    """
    if "LOCAL_RANK" not in os.environ:
        script = os.path.relpath(sys.argv[0])
        sys.exit(
            f"{script} runs as one of several ranks: start it with torchrun, for example\n"
            f"    torchrun --standalone --nproc-per-node 4 {script}"
        )
    die_with_parent()
    _refuse_restarts_that_cannot_work()
    asked, local_ranks = os.environ.get("LABKIT_DEVICE", "auto"), os.environ["LOCAL_WORLD_SIZE"]
    try:
        devices, backend = choose_devices(int(local_ranks), asked, "LABKIT_DEVICE")
    except ValueError as error:
        sys.exit(str(error))
    device = torch.device(devices[int(os.environ["LOCAL_RANK"])])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        schedule_as_batch()  # before gloo starts its threads
    own_gpu = device if "nccl" in backend else None
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=own_gpu)
    yield Place(dist.get_rank(), dist.get_world_size(), device)
    # Reached only without an exception: a rank that failed must not wait for the others here.
    # A launcher ends all ranks once one has failed: what they printed must be out before.
    sys.stdout.flush()
    leave_group()


def refuse(place: Place, text: str) -> NoReturn:
    """End every rank with exit code 1; rank 0 says why. Every rank must call it."""
    if place.rank == 0:
        print(text, flush=True)
    dist.barrier()  # torchrun ends rank 0, too, once another rank has failed
    raise SystemExit(1)


def leave_group() -> None:
    """Wait for every rank, then destroy the default process group.

    On the CPU, torch 2.13 can hang at the end of a script. A DDP wrapper that outlives the group
    joins gloo's thread in its destructor, with the interpreter's lock held. That thread may need
    the lock to drop its last collective. During the pause of 50 ms, it gets the lock.
    """
    dist.barrier()  # no rank may leave while another one still connects
    time.sleep(0.05)
    dist.destroy_process_group()


def choose_devices(ranks: int, asked: str, option: str) -> tuple[tuple[str, ...], str]:
    """One device for each of the ranks of this machine, and the backend for all of them.

    `asked` is "auto": NCCL and `cuda:rank` if there are as many GPUs as ranks, and otherwise gloo
    on the CPU; "cpu"; or "cuda", and then ranks share the GPUs over gloo if there are too few.
    `option` is what the caller's user calls it. Raises ValueError for another value, or if there is
    no GPU. Tested with a simulated number of GPUs; `make gpu` runs it with real ones, which has not
    been done yet.
    """
    if asked not in ("auto", "cpu", "cuda"):
        raise ValueError(f'{option} must be "auto", "cpu" or "cuda", got {asked!r}')
    gpus = 0 if asked == "cpu" else torch.cuda.device_count()
    if asked == "cuda" and gpus == 0:
        raise ValueError(f'{option} is "cuda", and torch finds no GPU. Use "auto" or "cpu".')
    if gpus >= ranks:
        # Both backends, so that small things may also be exchanged as CPU tensors.
        return tuple(f"cuda:{rank}" for rank in range(ranks)), "cpu:gloo,cuda:nccl"
    if asked == "cuda":  # NCCL refuses two ranks on one GPU
        return tuple(f"cuda:{rank % gpus}" for rank in range(ranks)), "gloo"
    return ("cpu",) * ranks, "gloo"


def _refuse_restarts_that_cannot_work() -> None:
    """Refuse a configuration in which restarted ranks cannot find each other.

    By default, torchrun keeps one store for all attempts, in which restarted ranks may read stale
    addresses (seen on torch 2.13). A store that rank 0 creates for each attempt avoids this.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        sys.exit(
            "torchrun --max-restarts: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each node. "
            "Otherwise restarted ranks may not find each other."
        )


def largest_on_any_rank(*numbers: float) -> float:
    """The largest of the numbers on any rank, the same on every rank; NaN if one of them is NaN.

    Every rank must call it with the same count of numbers. Costs one all-gather of 8 bytes per
    number, on the CPU.
    """
    # No maximum of an all-reduce, and none of Python's: both may leave a NaN out, which is the
    # worst that a difference can be.
    mine = torch.tensor(numbers, dtype=torch.float64)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    return torch.cat(of_ranks).max().item()
