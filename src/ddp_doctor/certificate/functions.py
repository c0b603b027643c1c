"""A script made of three functions: it is started as ranks, and as one process, like any other.

    python -m ddp_doctor.certificate.functions '{"path": […], "functions": [[module, file, name]…]}'

Each rank imports the functions by name, after the doctor has replaced what it replaces in torch.
"""

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from functools import reduce
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_doctor.certificate.marks import batch
from ddp_doctor.certificate.plan import WATCHED

RATE = 1e-3  # of SGD: no step of a certificate is kept, and later ones have to stay finite


def _found(module: str, file: str, name: str) -> Callable[..., Any]:
    function: Any = reduce(getattr, name.split("."), _loaded(module, file))
    return function


def _loaded(name: str, file: str) -> ModuleType:
    """The module of that name, from that file even if its folder is not on the path."""
    name = "__test_main__" if name == "__main__" else name
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        spec = None
    if spec is None or spec.origin != file:
        spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(text: str) -> None:
    """Train for as many steps as a certificate looks at."""
    given = json.loads(text)
    sys.path[:] = given["path"]
    make_model, loss, batches = (_found(*one) for one in given["functions"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make_model()
    if not isinstance(model, DistributedDataParallel | FSDPModule):
        model = DistributedDataParallel(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    source = batches(dist.get_rank(), dist.get_world_size())
    passes = itertools.repeat(source, WATCHED)
    for one in itertools.islice(itertools.chain.from_iterable(passes), WATCHED):
        optimizer.zero_grad()
        loss(model, one if isinstance(source, DataLoader) else batch(one)).backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
