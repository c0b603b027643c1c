"""Which tests a module holds, and which of them reach `DistributedDataParallel`."""

import inspect
import types
import unittest
from collections.abc import Iterator

from torch.distributed._composable.replicate import replicate
from torch.nn.parallel.distributed import DistributedDataParallel

_NAMES = frozenset({"DistributedDataParallel", "DDP"})


def tests(module: types.ModuleType) -> list[tuple[type[unittest.TestCase], str]]:
    """(class, method) for each test of a module that reaches `DistributedDataParallel`.

    Without the classes that the module imports from others.
    """
    cases = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == module.__name__
    ]
    return [
        (case, name)
        for case in cases
        for name in unittest.TestLoader().getTestCaseNames(case)
        if reaches_ddp(case, getattr(case, name))
    ]


def reaches_ddp(case: type, test: types.FunctionType) -> bool:
    """Whether the code of a test, or of a helper it calls, names the class.

    Followed are the methods of the test's own class and the functions and classes of its module.
    """
    homes = {base.__module__ for base in case.__mro__ if "test" in base.__module__}
    seen: set[types.CodeType] = set()
    waiting = [inspect.unwrap(test)]
    while waiting:
        function = waiting.pop()
        for code in _nested(function.__code__):
            if code in seen:
                continue
            seen.add(code)
            for name in (*code.co_names, *code.co_freevars):
                used = getattr(case, name, None) or function.__globals__.get(name)
                # torch's `replicate` wraps by the class.
                if name in _NAMES or used is DistributedDataParallel or used is replicate:
                    return True
                if getattr(used, "__module__", None) in homes | {function.__module__}:
                    waiting.extend(_functions(used))
    return False


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _functions(used: object) -> list[types.FunctionType]:
    """A function, without its decorators, or the methods of a class."""
    members = vars(used).values() if isinstance(used, type) else [inspect.unwrap(used)]
    return [member for member in members if isinstance(member, types.FunctionType)]


# The tests that ship inside torch, made runnable as PyTorch's own test files do it.


def _distributed_test() -> types.ModuleType:
    """`DistributedTest._DistTestBase`, with processes that it starts itself."""
    from torch.testing._internal.distributed import distributed_test as module

    class TestDistBackendWithSpawn(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    return _module("distributed_test", TestDistBackendWithSpawn)


def _ddp_under_dist_autograd_test() -> types.ModuleType:
    """DDP inside of, and around, distributed autograd (RPC)."""
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as module

    return _rpc(
        "ddp_under_dist_autograd_test",
        module.DdpUnderDistAutogradTest,
        module.DdpComparisonTest,
        module.CudaDdpComparisonTest,
    )


def _rpc_test() -> types.ModuleType:
    """The tests of RPC that wrap a module."""
    from torch.testing._internal.distributed.rpc import rpc_test as module

    return _rpc("rpc_test", module.RpcTest, module.CudaRpcTest, module.TensorPipeAgentRpcTest)


def _rpc(name: str, *mixins: type) -> types.ModuleType:
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as fixture

    agent = fixture.TensorPipeRpcAgentTestFixture
    classes = rpc_utils.generate_tests("TensorPipe", agent, list(mixins), name)
    return _module(name, *classes.values())


def _module(name: str, *classes: type) -> types.ModuleType:
    module = types.ModuleType(name)
    for cls in classes:
        cls.__module__ = name
        setattr(module, cls.__name__, cls)
    return module


SHIPPED = {
    "distributed_test": _distributed_test,
    "ddp_under_dist_autograd_test": _ddp_under_dist_autograd_test,
    "rpc_test": _rpc_test,
}
"""The files with tests of the class that ship inside torch, under `torch.testing._internal`."""
