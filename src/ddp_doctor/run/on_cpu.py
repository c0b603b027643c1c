"""`--cpu`: a script that was written for GPUs runs unchanged on CPU ranks, over gloo.

Each replacement tells `used` its name when the script first needs it, and the report lists these.
Only the user's own code is told that there are GPUs: libraries would try to use them.
"""

import contextlib
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ddp_doctor.facts.places import is_users

Used = Callable[[str], None]
Change = Callable[[list[Any], dict[str, Any]], None]  # of a call's arguments, in place
TYPES = ("Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double", "Bool", "BFloat16")
MEMORY = 1 << 34  # bytes that a GPU is said to have
GPU = SimpleNamespace(
    name="CPU", total_memory=MEMORY, major=8, minor=0, multi_processor_count=1, gcnArchName=""
)
_installed: list[int] = []  # the process that has done it


def install(used: Used) -> None:
    """Replace what needs a GPU in this process. Idempotent."""
    if os.getpid() in _installed:
        return
    _installed.append(os.getpid())
    _hide_gpus()
    told: set[str] = set()

    def tell(name: str) -> None:
        if name not in told:
            told.add(name)
            used(name)

    _groups(tell)
    _functions(tell)
    _streams(tell)
    _classes(tell)
    _programs(tell)
    _lightning(tell)
    _OnCpu(tell).__enter__()


def _hide_gpus() -> None:
    """Python reads that there are GPUs, and CUDA, which reads the environment itself, none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(_gpus())))
    os.putenv("CUDA_VISIBLE_DEVICES", "")


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
        # torch looks methods up by name: called once, one that is observed would be seen twice.
        if getattr(function, "__globals__", {}).get("__name__", "").startswith("ddp_doctor."):
            function = getattr(function, "__wrapped__", function)
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


def change_call(owner: Any, name: str, change: Change) -> None:
    """Let `change` have the arguments of `owner.name` first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        change(given, kwargs)
        return original(*given, **kwargs)

    setattr(owner, name, instead)


def _on_cpu(tell: Used, name: str) -> Change:
    """The CPU instead of every argument that is a GPU."""

    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        for found in (args, kwargs):
            keys: Any = range(len(found)) if isinstance(found, list) else list(found)
            for key in keys:
                if of_cpu(found[key]) is not found[key]:
                    tell(name)
                    found[key] = "cpu"

    return change


def _groups(tell: Used) -> None:
    def over_gloo(args: list[Any], kwargs: dict[str, Any], original: Any) -> None:
        kwargs |= inspect.signature(original).bind(*args, **kwargs).arguments
        args.clear()
        if kwargs.pop("device_id", None) is not None or "nccl" in str(kwargs.get("backend")):
            tell("nccl")
            kwargs["backend"] = "gloo"

    for name in ("init_process_group", "new_group"):
        original = getattr(dist, name)
        change_call(dist, name, functools.partial(over_gloo, original=original))
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    dist.Work.get_future = _future(dist.Work.get_future, tell)  # type: ignore[method-assign]
    change_call(dist.device_mesh, "init_device_mesh", _on_cpu(tell, 'init_device_mesh("cuda")'))
    dist.init_device_mesh = dist.device_mesh.init_device_mesh


def _replace(module: Any, name: str, result: Any, tell: Used, users_only: bool = False) -> None:
    """Let `module.name` return `result`, whatever it is given."""
    original = getattr(module, name)

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        if users_only and not is_users(sys._getframe(1).f_code.co_filename):
            return original(*args, **kwargs)
        tell(f"{module.__name__}.{name}")
        return result

    setattr(module, name, instead)


def _gpus() -> int:
    """One per rank; at least two, because the one process of a certificate has as many."""
    return max(2, int(os.environ.get("LOCAL_WORLD_SIZE", "2")))


# What a function of torch returns instead: to all, or only to the user's code.
TO_ALL: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "set_device synchronize empty_cache ipc_collect set_stream", None),
    (torch.cuda, "reset_peak_memory_stats reset_max_memory_allocated", None),
    (torch.cuda, "current_device memory_allocated max_memory_allocated", 0),
    (torch.cuda, "memory_reserved max_memory_reserved", 0),
    (torch.cuda, "get_device_name", GPU.name),
    (torch.cuda, "get_device_capability", (GPU.major, GPU.minor)),
    (torch.cuda, "get_device_properties", GPU),
    (torch.cuda, "mem_get_info", (MEMORY, MEMORY)),
    (torch.accelerator, "set_device_index set_device_idx synchronize", None),
    (torch.accelerator, "current_device_index current_device_idx", 0),
    # The CPU has one kernel for attention: switches would leave it without any.
    (torch.backends.cuda, "enable_flash_sdp enable_math_sdp enable_mem_efficient_sdp", None),
    (torch.backends.cuda, "enable_cudnn_sdp", None),
)
TO_USERS: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "is_available is_bf16_supported", True),
    (torch.accelerator, "is_available", True),
    (torch.accelerator, "current_accelerator", torch.device("cuda")),
)


def _functions(tell: Used) -> None:
    gpus = [(module, "device_count", _gpus()) for module in (torch.cuda, torch.accelerator)]
    for table, users_only in ((TO_ALL, False), ((*TO_USERS, *gpus), True)):
        for module, names, result in table:
            for name in names.split():
                _replace(module, name, result, tell, users_only)
    for kind in TYPES:
        tensors = _type(getattr(torch, f"{kind}Tensor"), f"torch.cuda.{kind}Tensor", tell)
        setattr(torch.cuda, f"{kind}Tensor", tensors)


def _type(on_cpu: Any, name: str, tell: Used) -> Any:
    """A type of tensors that is told once it makes one."""

    def make(*args: Any, **kwargs: Any) -> Any:
        tell(name)
        return on_cpu(*args, **kwargs)

    return make


class _Stream:
    """Does nothing: all work of a CPU rank is in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Event(_Stream):
    """The time of `record`."""

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds."""
        return 1e3 * (end.time - self.time)


def _streams(tell: Used) -> None:
    def said(kind: type[_Stream]) -> type[_Stream]:
        class Said(kind):  # type: ignore[misc,valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                tell(f"torch.cuda.{kind.__name__[1:]}")
                super().__init__()

        return Said

    torch.Stream, torch.Event = said(_Stream), said(_Event)  # type: ignore[misc,assignment]
    torch.cuda.Stream, torch.cuda.Event = said(_Stream), said(_Event)  # type: ignore[misc,assignment]
    for name in ("current_stream", "default_stream"):
        _replace(torch.cuda, name, _Stream(), tell)
    _replace(torch.cuda, "stream", contextlib.nullcontext(), tell)


def _programs(tell: Used) -> None:
    """`nvidia-smi` prints a line instead of being missing."""

    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        command = args[1] if len(args) > 1 else kwargs.get("args")
        words = command.split() if isinstance(command, str) else list(map(str, command or ()))
        if words and os.path.basename(words[0]) == "nvidia-smi":
            tell("nvidia-smi")
            kwargs.pop("args", None)
            args[1:2] = ["echo no GPU" if kwargs.get("shell") else ["echo", "no GPU"]]

    change_call(subprocess.Popen, "__init__", change)


def lightning_of_the_script() -> str:
    """The package that the script imports: lightning, pytorch_lightning, lightning_fabric, or "".

    Only then is it worth the time to import it here.
    """
    for argument in sys.argv:
        if argument.endswith(".py") and os.path.isfile(argument) and is_users(argument):
            text = Path(argument).read_text(errors="replace")
            found = re.search(
                r"^\s*(?:import|from) ((?:pytorch_)?lightning(?:_fabric)?)\b", text, re.M
            )
            return found[1] if found else ""
    return ""


def _lightning(tell: Used) -> None:
    """Lightning gets CPUs, and DDP instead of FSDP, which it has for GPUs only."""

    def connector(args: list[Any], kwargs: dict[str, Any]) -> None:
        if kwargs.get("accelerator") in ("gpu", "cuda"):
            tell(f'accelerator="{kwargs["accelerator"]}"')
            kwargs["accelerator"] = "cpu"
        strategy = kwargs.get("strategy")
        if "fsdp" in str(strategy if isinstance(strategy, str) else type(strategy)).lower():
            tell("FSDPStrategy (DDP here)")
            kwargs["strategy"] = "ddp"

    names = {
        "lightning": ("lightning.pytorch", "lightning.fabric"),
        "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
        "lightning_fabric": ("lightning_fabric",),
    }
    for name in names.get(lightning_of_the_script(), ()):
        at = "connector" if name.endswith("fabric") else "trainer.connectors.accelerator_connector"
        module: Any = importlib.import_module(f"{name}.{at}")
        kind = module._Connector if name.endswith("fabric") else module._AcceleratorConnector
        change_call(kind, "__init__", connector)


def _future(get_future: Any, tell: Used) -> Any:
    """Gloo's reduce-scatter has no future: wait for it, and return one that is done."""

    @functools.wraps(get_future)
    def future(work: Any) -> Any:
        try:
            return get_future(work)
        except RuntimeError:
            tell("Work.get_future")
            work.wait()
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result([])
            return done

    return future


def _classes(tell: Used) -> None:
    wrap = nn.parallel.DistributedDataParallel

    def without_devices(args: list[Any], kwargs: dict[str, Any]) -> None:
        given = [*args[2:4], kwargs.pop("device_ids", None), kwargs.pop("output_device", None)]
        args[2:4] = [None] * len(args[2:4])
        if any(one is not None for one in given):
            tell("device_ids")

    def on_the_cpu(args: list[Any], kwargs: dict[str, Any]) -> None:
        where = args.pop(1) if len(args) > 1 else kwargs.get("map_location")
        if where not in (None, "cpu"):
            tell("torch.load's map_location")
        kwargs["map_location"] = "cpu"

    def unchanged(module: nn.Module, process_group: Any = None) -> nn.Module:
        tell("SyncBatchNorm (each rank now uses its own samples)")
        return module

    change_call(nn.Module, "to", _on_cpu(tell, '.to("cuda")'))
    change_call(torch.autocast, "__init__", _on_cpu(tell, 'autocast("cuda")'))
    change_call(torch, "load", on_the_cpu)
    change_call(wrap, "__init__", without_devices)
    torch.Generator = _generator(torch.Generator, tell)  # type: ignore[misc]
    nn.SyncBatchNorm.convert_sync_batchnorm = unchanged  # type: ignore[method-assign]


def _generator(draws: Any, tell: Used) -> Any:
    class Kind(type(draws)):  # type: ignore[misc]
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, draws)

    class Generator(draws, metaclass=Kind):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            if of_cpu(device) is not device:
                tell('torch.Generator("cuda")')
            return draws(of_cpu(device))

    return Generator
