"""What is replaced around the tests: the class, and the devices that tensors are placed on.

Every binding of torch's `DistributedDataParallel` becomes another class (`swap`). What a test puts
on any GPU is put on a target, and NCCL becomes gloo. The target is the CPU, or one GPU that all
ranks share. A test says where its tensors go in four ways, and each is rewritten while it runs: a
device argument of a torch function (`OnTarget`), the current device of `torch.cuda`
(`pretend_devices`), the ``device_ids`` of the wrapper (`replace_device_ids`), and the backend of
the process group. The gates that would skip the test on a machine with too few GPUs are opened
(`open_gates`). On the CPU `torch.cuda.is_available()` stays False, and the library goes its CPU
ways.
"""

import contextlib
import functools
import importlib
import inspect
import os
import sys
import threading
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

from miniddp.sync_batch_norm import SyncBatchNorm

# 1. The class ------------------------------------------------------------------------------------

CLASSES = {
    "torch": "torch.nn.parallel.distributed:DistributedDataParallel",
    "miniddp": "miniddp.torch_drop_in:DistributedDataParallel",
}

_NEIGHBOURS = (
    "torch.distributed.algorithms.join",
    "torch.distributed.algorithms.model_averaging.averagers",
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook",
    "torch.distributed.algorithms._optimizer_overlap.optimizer_overlap",
    "torch.distributed.optim",
    "torch.distributed._composable.replicate",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel.ddp",
    "torch._dynamo",
)
"""Modules of torch that name the class; imported first, so that their names are swapped as well."""


def load(name: str) -> type:
    """The class of that name in `CLASSES`, or of a ``module:attribute`` path."""
    module, _, attribute = CLASSES.get(name, name).partition(":")
    return getattr(importlib.import_module(module), attribute)


def swap(cls: type) -> None:
    """Bind every name that stands for torch's class, in every module imported so far, to `cls`.

    A module that is imported later takes the class from one of these.
    """
    if cls is DistributedDataParallel:
        return
    for neighbour in _NEIGHBOURS:
        importlib.import_module(neighbour)
    own = sys.modules[cls.__module__].__name__.partition(".")[0]
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name == __name__ or name.partition(".")[0] == own:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is DistributedDataParallel:
                setattr(module, attribute, cls)
    if torch.nn.parallel.DistributedDataParallel is not cls:
        raise RuntimeError(f"torch.nn.parallel.DistributedDataParallel could not be set to {cls}")


class Constructions:
    """Counts how often the class is constructed in the processes of one test.

    A test that passes without constructing it says nothing about the class. The count is the length
    of a file, because the constructions happen in the ranks' processes.
    """

    path: str | None = None

    @classmethod
    def watch(cls, watched: type) -> None:
        construct = watched.__init__

        @functools.wraps(construct)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            if cls.path is not None:
                with open(cls.path, "ab", buffering=0) as file:
                    file.write(b".")
            construct(self, *args, **kwargs)

        watched.__init__ = __init__

    @classmethod
    def count(cls) -> int:
        return os.path.getsize(cls.path) if cls.path and os.path.exists(cls.path) else 0


# 2. The devices ----------------------------------------------------------------------------------

CPU = torch.device("cpu")

PRETENDED_GPUS = 8
"""What `torch.cuda.device_count()` says to the tests: none of them asks for more."""

_GATE_FACTORIES = (
    "skip_if_lt_x_gpu",
    "nccl_skip_if_lt_x_gpu",
    "require_n_gpus_for_nccl_backend",
    "requires_nccl",
    "requires_gloo",
    "requires_nccl_version",
    "requires_accelerator_dist_backend",
    "requires_world_size",
    "skip_but_pass_in_sandcastle",
    "skip_but_pass_in_sandcastle_if",
)
_GATES = ("skip_if_no_gpu", "skip_if_small_worldsize", "skip_if_rocm_multiprocess")


def is_gpu(device: Any) -> bool:
    """Whether a device argument names a GPU: an index, ``"cuda:1"`` or such a `torch.device`."""
    if isinstance(device, bool):
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def placed(device: Any, target: torch.device) -> Any:
    """The target for a GPU; anything else unchanged."""
    return target if is_gpu(device) else device


class OnTarget(TorchFunctionMode):
    """While active, every torch function that is given a GPU as its device gets the target."""

    def __init__(self, target: torch.device) -> None:
        super().__init__()
        self.target = target

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device and args and isinstance(args[0], int):
            return torch.device("cuda", args[0])  # an index alone needs an accelerator to be there
        if func is torch.Tensor.cuda:
            return args[0].to(self.target)
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], placed(args[1], self.target), *args[2:])
        if "device" in kwargs:
            kwargs["device"] = placed(kwargs["device"], self.target)
        return func(*args, **kwargs)


def in_every_thread(target: torch.device) -> None:
    """Activate `OnTarget`, which holds for one thread, in each thread started from now on."""
    run = threading.Thread.run

    def run_on_target(self: threading.Thread) -> None:
        with OnTarget(target):
            run(self)

    threading.Thread.run = run_on_target


def replace_device_ids(cls: type, target: torch.device) -> None:
    """Let ``device_ids`` and ``output_device`` of GPUs be the target for the constructor of `cls`.

    As None if that is the CPU: torch's DDP refuses them for a module there, as it must.
    """
    index = target.index
    construct = cls.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        bound = signature.bind(self, *args, **kwargs)
        ids = bound.arguments.get("device_ids")
        if ids and all(map(is_gpu, ids)):
            bound.arguments["device_ids"] = None if index is None else [index]
        if is_gpu(bound.arguments.get("output_device")):
            bound.arguments["output_device"] = index
        construct(*bound.args, **bound.kwargs)

    cls.__init__ = __init__


def open_gates() -> None:
    """Let every test run, whatever it says it needs.

    To be called before the module of the tests is imported: its decorators run at import.
    """
    from torch.testing._internal import common_distributed, common_utils

    def opened(test: Any) -> Any:
        if isinstance(test, type):
            return test

        @functools.wraps(test)  # PyTorch's own code looks for what is below a decorator
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return test(*args, **kwargs)

        return wrapper

    for module in (common_utils, common_distributed):
        for name in (*_GATE_FACTORIES, *_GATES):
            if hasattr(module, name):
                setattr(module, name, opened if name in _GATES else lambda *_, **__: opened)
    unittest.skip = unittest.skipIf = unittest.skipUnless = lambda *_, **__: opened


class _SyncBatchNorm(SyncBatchNorm):
    """Constructs the project's SyncBatchNorm, which is no instance of what torch's name stands for.

    So no wrapper refuses it, as it would a layer that cannot run on the CPU.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> SyncBatchNorm:
        return SyncBatchNorm(*args, **kwargs)


class _Done:
    """A stream, or an event, of a CPU: what was enqueued has run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """There is one stream, and nothing to record."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def smaller_models(test: Callable) -> None:
    """Let the constant 1000 in the code of `test` be 24.

    In `test_ddp_uneven_inputs` it sizes some models and their inputs: images of 1000 x 1000 points
    and layers of a million parameters, in 252 cases. On a CPU, this takes hours.
    """
    function = inspect.unwrap(test)
    code = function.__code__
    function.__code__ = code.replace(
        co_consts=tuple(24 if constant == 1000 else constant for constant in code.co_consts)
    )


def pretend_devices(target: torch.device) -> None:
    """Give the tests devices that can be counted and chosen, and a gloo group for an NCCL one."""

    @contextlib.contextmanager
    def device(_: Any) -> Iterator[None]:
        yield

    move = torch.nn.Module.to

    @functools.wraps(move)
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if "device" in kwargs:
            kwargs["device"] = placed(kwargs["device"], target)
        return move(self, *(placed(argument, target) for argument in args), **kwargs)

    torch.nn.Module.to = to
    torch.cuda.device_count = torch.accelerator.device_count = lambda: PRETENDED_GPUS
    torch.cuda.set_device = torch.accelerator.set_device_index = lambda device: None
    torch.cuda.device = device
    if target.type == "cpu":
        _pretend_cuda()
    else:
        _share_the_gpu()

    _pretend_nccl()
    # FSDP, in the tests that hold DDP's state beside its own, has to be told.
    shard = FullyShardedDataParallel.__init__
    FullyShardedDataParallel.__init__ = functools.wraps(shard)(
        lambda self, *args, **kwargs: shard(self, *args, **{"device_id": target, **kwargs})
    )


def _pretend_nccl() -> None:
    """Groups of NCCL are gloo's, and need no device."""
    common_distributed.DistributedTestBase.backend = lambda self, device: "gloo"
    for name in ("init_process_group", "new_group", "new_subgroups"):
        replaced = _gloo_for_nccl(getattr(dist, name))
        setattr(dist, name, replaced)
        setattr(dist.distributed_c10d, name, replaced)
    # ZeRO's overlapping hooks refuse a group that calls itself gloo.
    ddp_zero_hook.dist = types.ModuleType(dist.__name__)
    vars(ddp_zero_hook.dist).update(vars(dist), get_backend=lambda group=None: "nccl")
    barrier = dist.barrier
    dist.barrier = functools.wraps(barrier)(
        lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    )


def _gloo_for_nccl(create: Callable) -> Callable:
    signature = inspect.signature(create)

    @functools.wraps(create)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("backend") == "nccl":
            bound.arguments["backend"] = "gloo"
            bound.arguments.pop("pg_options", None)
        if is_gpu(bound.arguments.get("device_id")):
            del bound.arguments["device_id"]
        return create(*bound.args, **bound.kwargs)

    return wrapper


def _pretend_cuda() -> None:
    """On the CPU: what torch.cuda does has been done, as the CPU runs in the program's order."""
    # A build with CUDA would count the pretended devices.
    torch.cuda.is_available = lambda: False
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    torch.cuda.empty_cache = lambda: None
    torch.cuda.is_bf16_supported = lambda *_, **__: False  # torch's DDP refuses its hook on a CPU
    torch.cpu.device_count = lambda: PRETENDED_GPUS
    torch.accelerator.synchronize = lambda device=None: None
    torch.accelerator.current_device_index = lambda: 0
    torch.cpu.manual_seed = torch.manual_seed
    # Torch's SyncBatchNorm has no kernels for the CPU. Ours stands in, whatever class is tested.
    torch.nn.SyncBatchNorm = _SyncBatchNorm
    # What waits for a stream on a GPU need not on a CPU.
    torch.Event = _Done
    torch.accelerator.current_stream = lambda device=None: _Done()
    torch.cuda.amp.autocast = functools.partial(torch.autocast, "cpu")
    torch.cuda.amp.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")


def _share_the_gpu() -> None:
    """On one GPU: a function that is asked about any of the pretended ones asks about that one."""
    for module, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda, "current_stream"),
        (torch.cuda, "default_stream"),
        (torch.accelerator, "synchronize"),
        (torch.accelerator, "current_stream"),
    ):
        function = getattr(module, name)
        setattr(module, name, lambda device=None, function=function: function())
