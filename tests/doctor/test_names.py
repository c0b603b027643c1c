"""Parameters have the same names on all ranks, whatever the order of the live objects."""

import gc

import pytest
from torch import nn

from ddp_doctor.observe.models import Names


@pytest.mark.parametrize("order", ["the module first", "the wrapper first"])
def test_a_wrapped_modules_parameters_have_its_own_names(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is found first depends on the last garbage collection, which differs between ranks."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    # Like every wrapper of data parallelism: the module is its `module`, and nothing is added.
    both: list[nn.Module] = [net, nn.ModuleDict({"module": net})]
    live = both if order == "the module first" else both[::-1]
    monkeypatch.setattr(gc, "get_objects", lambda: live)
    names = Names().of(list(net.parameters()), [])
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_parameters_of_two_models_without_a_wrapper_have_different_names() -> None:
    layers = [nn.Linear(2, 3, bias=False) for _ in range(4)]
    one, other = nn.Sequential(*layers[:2]), nn.ModuleList(layers[2:])
    names = Names()
    first, second = (names.of(list(model.parameters()), []) for model in (one, other))
    assert first == ["0.weight", "1.weight"]
    assert second == ["ModuleList:0.weight", "ModuleList:1.weight"]
