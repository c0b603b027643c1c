"""Whole values from shards, and shards from whole values: what is saved, and loaded on another W.

    torch.save((full_state_dict(model), full_optimizer_state_dict(model, optimizer)), path)
    ...
    model_state, optimizer_state = torch.load(path)       # on any number of ranks
    load_full_state_dict(model, model_state)
    load_full_optimizer_state_dict(model, optimizer, optimizer_state)

Every rank must call these functions, and every rank gets the same result. They cost one all-gather
per sharded tensor, and loading costs none. Source: torch.distributed.checkpoint.state_dict, whose
form of an optimizer's state, by parameter names, is used here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from miniddp.sharded.schedule import states_of


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with whole parameters, in their own dtype and on their device."""
    state = _sharded(module).state_dict(keep_vars=True)
    plain = {n: v.detach() if isinstance(v, Tensor) else v for n, v in state.items()}
    shards = {name: value for name, value in state.items() if hasattr(value, "sharding")}
    return plain | {name: shard.sharding.gather(plain[name]) for name, shard in shards.items()}


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load what `full_state_dict` returned, or the state dict of an unsharded copy.

    Raises RuntimeError if names or shapes differ, as `nn.Module.load_state_dict` does.
    """
    own = _sharded(module).state_dict(keep_vars=True)
    shards = dict(state_dict)
    for name, value in own.items():
        if hasattr(value, "sharding") and name in shards:
            if shards[name].shape != value.sharding.size:
                raise RuntimeError(
                    f"{name} has the shape {tuple(shards[name].shape)} in this state dict, and "
                    f"{tuple(value.sharding.size)} in the module"
                )
            shards[name] = value.sharding.shard(shards[name])
    module.load_state_dict(shards)


def full_optimizer_state_dict(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by the names of `module`'s parameters, with whole tensors."""
    saved, named = optimizer.state_dict(), _named_parameters(module, optimizer)
    state = {}
    for index, values in sorted(saved["state"].items()):
        name, parameter = named[index]
        sharding = getattr(parameter, "sharding", None)
        state[name] = _converted(values, parameter.shape, sharding and sharding.gather)
    groups = [{**g, "params": [named[i][0] for i in g["params"]]} for g in saved["param_groups"]]
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state_dict(
    module: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load what `full_optimizer_state_dict` returned, on any number of ranks.

    The optimizer has to have groups of the same parameters. Raises ValueError if it has not.
    """
    named, own = _named_parameters(module, optimizer), optimizer.state_dict()["param_groups"]
    here = [[named[index][0] for index in group["params"]] for group in own]
    saved = [list(group["params"]) for group in state_dict["param_groups"]]
    if here != saved:
        raise ValueError(
            "the optimizer's groups differ from the saved ones: build it from the same parameters, "
            f"in the same order. Here: {here}. Saved: {saved}"
        )
    state = {}
    for index, (name, parameter) in enumerate(named):
        if values := state_dict["state"].get(name):
            sharding = getattr(parameter, "sharding", None)
            shape = sharding.size if sharding else parameter.shape
            state[index] = _converted(values, shape, sharding and sharding.shard)
    pairs = zip(state_dict["param_groups"], own, strict=True)
    groups = [{**of_saved, "params": group["params"]} for of_saved, group in pairs]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _named_parameters(module: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters with their names, in the order of its state dict."""
    names = {parameter: name for name, parameter in _sharded(module).named_parameters()}
    shard_of = getattr(optimizer, "shard_of", {})  # ZeRO's parameters are whole, its state is not
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [(names[parameter], shard_of.get(parameter, parameter)) for parameter in parameters]


def _sharded(module: nn.Module) -> nn.Module:
    """`module`, with its sharded parameters registered."""
    for state in states_of(module):
        state.group.reshard()
    return module


def _converted(
    values: Mapping[str, Any], shape: torch.Size, convert: Callable[[Tensor], Tensor] | None
) -> dict[str, Any]:
    """The state of a parameter of this shape, with `convert` of what has as many elements."""
    # A step count is a scalar, as a parameter may be.
    divided = {
        key: convert(value).clone()
        for key, value in values.items()
        if convert and key != "step" and isinstance(value, Tensor) and value.shape == shape
    }
    return {**values, **divided}
