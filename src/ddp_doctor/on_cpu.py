"""`--cpu`: a script that was written for GPUs runs unchanged on CPU ranks, over gloo.

Each replacement tells `used` its name when the script first needs it, and the report lists these.
Only the user's own code is told that there are GPUs: libraries would try to use them.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ddp_doctor.places import is_users

Used = Callable[[str], None]
NOTHING_TO_DO = (
    "set_device",
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
    "set_stream",
)
NUMBERS = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved")
_installed: list[int] = []  # the process that has done it


def install(used: Used) -> None:
    """Replace what needs a GPU in this process. Idempotent."""
    if os.getpid() in _installed:
        return
    _installed.append(os.getpid())
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    told: set[str] = set()

    def tell(name: str) -> None:
        if name not in told:
            told.add(name)
            used(name)

    _groups(tell)
    _cuda(tell)
    _classes(tell)
    _OnCpu(tell).__enter__()


def of_cpu(device: Any) -> Any:
    """`device`, or the CPU if it is a GPU: a name, a torch.device, or a number."""
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        return device
    return "cpu" if isinstance(device, int) or str(device).startswith("cuda") else device


class _OnCpu(TorchFunctionMode):
    """Sees every function of torch that is given a device; modules use the same ones."""

    def __init__(self, tell: Used) -> None:
        super().__init__()
        self.tell = tell

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            self.tell(f".{name}()")
            return args[0]
        if name == "to" and len(args) > 1 and of_cpu(args[1]) is not args[1]:
            self.tell('.to("cuda")')
            args = (args[0], "cpu", *args[2:])
        elif of_cpu(kwargs.get("device")) is not kwargs.get("device"):
            self.tell('device="cuda"')
            kwargs = {**kwargs, "device": "cpu"}
        return function(*args, **kwargs)


def _groups(tell: Used) -> None:
    def over_gloo(original: Any) -> Any:
        @functools.wraps(original)
        def group(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            device = given.pop("device_id", None)
            if "nccl" in str(given.get("backend")) or device is not None:
                tell("nccl")
                given["backend"] = "gloo"
            return original(**given)

        return group

    for name in ("init_process_group", "new_group"):
        changed = over_gloo(getattr(dist, name))
        setattr(dist, name, changed)
        setattr(dist.distributed_c10d, name, changed)
    make = dist.device_mesh.init_device_mesh

    @functools.wraps(make)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if of_cpu(device_type) != device_type:
            tell('init_device_mesh("cuda")')
        return make(of_cpu(device_type), *args, **kwargs)

    dist.init_device_mesh = dist.device_mesh.init_device_mesh = init_device_mesh


def _cuda(tell: Used) -> None:
    def replace(name: str, result: Any, users_only: bool = False) -> None:
        original = getattr(torch.cuda, name)

        @functools.wraps(original)
        def instead(*args: Any, **kwargs: Any) -> Any:
            if users_only and not is_users(sys._getframe(1).f_code.co_filename):
                return original(*args, **kwargs)
            tell(f"torch.cuda.{name}")
            return result

        setattr(torch.cuda, name, instead)

    for name in NOTHING_TO_DO:
        replace(name, None)
    for name in NUMBERS:
        replace(name, 0)
    replace("is_available", True, users_only=True)
    replace("is_bf16_supported", True, users_only=True)
    replace("device_count", int(os.environ.get("LOCAL_WORLD_SIZE", "2")), users_only=True)


def _classes(tell: Used) -> None:
    wrap, cast, load = nn.parallel.DistributedDataParallel, torch.autocast, torch.load
    make_wrapper, make_cast = wrap.__init__, cast.__init__

    @functools.wraps(make_wrapper)
    def wrapper(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if device_ids is not None or output_device is not None:
            tell("device_ids")
        make_wrapper(self, module, None, None, *args, **kwargs)

    @functools.wraps(make_cast)
    def autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if of_cpu(device_type) != device_type:
            tell('autocast("cuda")')
        make_cast(self, of_cpu(device_type), *args, **kwargs)

    @functools.wraps(load)
    def loaded(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location not in (None, "cpu"):
            tell("torch.load's map_location")
        return load(file, "cpu", *args, **kwargs)

    def unchanged(module: nn.Module, process_group: Any = None) -> nn.Module:
        tell("SyncBatchNorm (each rank now uses its own samples)")
        return module

    wrap.__init__ = wrapper  # type: ignore[method-assign,assignment]
    cast.__init__ = autocast  # type: ignore[method-assign,assignment]
    torch.load = loaded
    nn.SyncBatchNorm.convert_sync_batchnorm = unchanged  # type: ignore[method-assign,assignment]
