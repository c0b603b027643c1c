"""The test classes that ship inside torch, made runnable as PyTorch's own test files do it."""

import types

RPC_AGENT = "TensorPipe"


def distributed_test() -> types.ModuleType:
    """`DistributedTest._DistTestBase`, with processes that it starts itself."""
    from torch.testing._internal.distributed import distributed_test as module

    class TestDistBackendWithSpawn(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    return _module("distributed_test", TestDistBackendWithSpawn)


def ddp_under_dist_autograd_test() -> types.ModuleType:
    """DDP inside of, and around, distributed autograd (RPC)."""
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as module

    return _rpc(
        "ddp_under_dist_autograd_test",
        module.DdpUnderDistAutogradTest,
        module.DdpComparisonTest,
        module.CudaDdpComparisonTest,
    )


def rpc_test() -> types.ModuleType:
    """The tests of RPC that wrap a module."""
    from torch.testing._internal.distributed.rpc import rpc_test as module

    return _rpc("rpc_test", module.RpcTest, module.CudaRpcTest, module.TensorPipeAgentRpcTest)


def _rpc(name: str, *mixins: type) -> types.ModuleType:
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as fixture

    agent = fixture.TensorPipeRpcAgentTestFixture
    classes = rpc_utils.generate_tests(RPC_AGENT, agent, list(mixins), name)
    return _module(name, *classes.values())


def _module(name: str, *classes: type) -> types.ModuleType:
    module = types.ModuleType(name)
    for cls in classes:
        cls.__module__ = name
        setattr(module, cls.__name__, cls)
    return module
