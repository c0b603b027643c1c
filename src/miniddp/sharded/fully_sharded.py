"""`fully_shard`: every rank holds 1/W of the parameters, gradients, and optimizer state.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)                                   # what no block holds
    optimizer = torch.optim.AdamW(model.parameters())    # of this rank's rows

Each call makes one group of parameters. What one step does with a group:

1. *Forward.* Gather the whole parameters, compute, and free them (`reshard_after_forward`).
2. *Backward.* When the first gradient of an output arrives, gather them again. When the gradients
   of all inputs have been computed, free them, and launch the reduction of their gradients.
3. *End of backward.* Wait for the reductions: each sharded parameter has its rows of the average.

Every rank must run the same groups in the same order, because their messages are matched by their
order alone; a gather on the CPU checks it. Inside a group, ranks may use different parameters.

Cost for Ψ bytes of parameters on W ranks: each sends 3(W−1)/W·Ψ per step, or, like DDP,
2(W−1)/W·Ψ without `reshard_after_forward`. Memory: Ψ/W, and the whole of two groups.

The names are those of torch.distributed.fsdp (FSDP2), the source. Differences: the parameters are
ordinary tensors instead of DTensors; rank 0's values are broadcast at the start; gradients are
divided here instead of by NCCL. Left out: offloading, an int for `reshard_after_forward`,
`unshard`, `reshard`, `register_fsdp_forward_method`, and FSDPModule's other setters. Like torch, it
has no second derivatives: backward frees what they need. With float16, scale the loss by torch's
`ShardedGradScaler`: `GradScaler` looks for infinities in this rank's rows only.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from miniddp.comm import this_group
from miniddp.ddp import is_wrapped
from miniddp.replicas import broadcast_tensors, verify_same_model
from miniddp.sharded.fsdp_state import FSDPState
from miniddp.sharded.param import FSDPParam, Owner
from miniddp.sharded.param_group import FSDPParamGroup
from miniddp.sharded.schedule import states_of
from miniddp.sharded.sharding import Sharding, install_refusal_of_shards


class FSDPModule:
    """What `fully_shard` adds to a module's class."""

    fsdp_state: FSDPState
    averages_its_shards = True  # so no wrapper takes it

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether the next backwards reduce. If not, whole gradients accumulate on each rank.

        As in torch, `zero_grad` does not clear those: the next reduction includes them.
        """
        for state in states_of(cast(nn.Module, self), recurse):
            state.group.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With HSDP: whether the next backwards sum over the replicas, too.

        If not, each rank keeps the sums of its own replica, and the next all-reduce includes them.
        """
        for state in states_of(cast(nn.Module, self), recurse):
            state.group.requires_all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the summed gradients of this module's own group by `factor` instead of by W.

        As in torch, groups of submodules keep theirs. Raises ValueError unless `factor` is finite
        and positive.
        """
        if not 0 < factor < float("inf"):
            raise ValueError(f"the factor must be a finite, positive number, got {factor}")
        self.fsdp_state.group.gradient_divide_factor = factor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDPModule":
        """Convert the sharded parameters, for `.to(dtype)` and its like."""
        self.fsdp_state.group.reshard()
        super()._apply(fn, recurse)  # type: ignore[misc]
        for param in self.fsdp_state.group.params:
            param.make_unsharded()
        return self

    def __deepcopy__(self, memo: dict) -> "FSDPModule":
        raise TypeError(
            "a sharded module cannot be copied: build a second one, call fully_shard on it, and "
            "load the first one's full_state_dict"
        )


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Shard the parameters of `module` that no earlier call has sharded. Returns `module`.

    Call it on every rank: on submodules first, then on the module that holds them. It changes the
    module in place, to a class with the methods of `FSDPModule`. Rank 0's parameters are broadcast;
    buffers are left alone. Make the optimizer afterwards.

    Args:
        module: with dense, contiguous parameters of at least one dimension.
        mesh: of one dimension, or of two for HSDP: divided along the second, replicated along the
            first. None takes all ranks.
        reshard_after_forward: free the whole parameters between forward and backward. None, as in
            torch, frees those of all modules but the outermost one.
        mp_policy: as in torch: the dtypes to compute, reduce, and return in.

    Raises ValueError for another mesh, for a module that has no forward, has been sharded, or is
    wrapped in MiniDDP, and for a parameter that cannot be divided or is tied to one that another
    call has sharded. Raises RuntimeError on every rank if the ranks' modules differ.
    """
    _check_callable(module)
    install_refusal_of_shards()
    groups = _groups_of(mesh)
    owners = _owners_of(module)
    _make_equal(module, owners, groups)
    policy = mp_policy or MixedPrecisionPolicy()
    params = [
        FSDPParam(parameter, places, Sharding(parameter.shape, *groups), policy)
        for parameter, places in owners.items()
    ]
    group = FSDPParamGroup(params, *groups)
    module.__class__ = _sharded_class(type(module))
    module.fsdp_state = FSDPState(module, group, policy, reshard_after_forward)
    return module


@cache
def _sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` with the methods of `FSDPModule`."""
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


def _check_callable(module: Any) -> None:
    """Raise unless `module` is one module, with a forward, neither sharded nor wrapped."""
    if not isinstance(module, nn.Module) or type(module).forward is nn.Module.forward:
        raise ValueError(
            f"a {type(module).__name__} is never called, so fully_shard cannot gather its "
            "parameters: pass each module in it, or the module whose forward calls them"
        )
    if isinstance(module, FSDPModule):
        raise ValueError(f"this {type(module).__name__} has been sharded already")
    if any(map(is_wrapped, module.modules())):
        raise ValueError(
            "fully_shard reduces the gradients itself, but a module here is wrapped in MiniDDP or "
            "DistributedDataParallel: shard the wrapper's .module instead"
        )


def _make_equal(
    module: nn.Module, owners: dict[nn.Parameter, list[Owner]], groups: list[dist.ProcessGroup]
) -> None:
    """Take the parameters of the groups' first ranks, if all ranks have the same module."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    named = {names[parameter]: parameter for parameter in owners}
    problem = _problem_with(named)
    for group in groups:
        try:
            verify_same_model(named, group, {"class": type(module).__name__}, problem)
        except Exception as error:  # the ranks of the next group wait for this one, and learn of it
            problem = error
    if problem is not None:
        raise problem
    for group in groups:
        broadcast_tensors(list(owners), group, src=0)


def _groups_of(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """The ranks that divide a parameter, and with HSDP those that hold the same part of it."""
    if mesh is None:
        return [this_group(None)]
    if mesh.ndim > 2:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions: use one, or two for HSDP")
    return [mesh.get_group(dimension) for dimension in reversed(range(mesh.ndim))]


def _owners_of(module: nn.Module) -> dict[nn.Parameter, list[Owner]]:
    """The parameters that are not yet sharded, with the places in which they are registered."""
    owners: dict[nn.Parameter, list[Owner]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if not hasattr(parameter, "sharding"):
                owners.setdefault(parameter, []).append((part, name))
    return owners


def _problem_with(named: dict[str, nn.Parameter]) -> Exception | None:
    """Why this rank cannot shard these parameters; None if it can."""
    for name, parameter in named.items():
        if hasattr(parameter, "sharded_as"):
            return ValueError(
                f"{name} is tied to a parameter that an earlier call has sharded: shard both with "
                "one call, of the module that holds them"
            )
        if type(parameter.detach()) is not Tensor:
            return ValueError(f"{name} is a {type(parameter).__name__}: pass an ordinary tensor")
        if parameter.ndim == 0:
            return ValueError(f"{name} is a scalar, which has no rows: give it the shape (1,)")
        if not parameter.is_contiguous():
            return ValueError(f"{name} is not contiguous: pass its .contiguous() values")
        if parameter.is_meta:
            return ValueError(f"{name} has no values yet (device meta): initialize it first")
    return None
