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

Two gathers are prefetched: in forward, that of the group that came next in the last forward; in
backward, that of the group that ran before this one. Every rank must run the same groups in the
same order, because their messages are matched by their order alone; a gather on the CPU checks it.
Inside a group, ranks may use different parameters.

Cost for Ψ bytes of parameters on W ranks: each sends 3(W−1)/W·Ψ per step, or, like DDP,
2(W−1)/W·Ψ without `reshard_after_forward`. Memory: Ψ/W, and the whole of two groups.

The names are those of torch.distributed.fsdp (FSDP2), the source. Differences: the parameters are
ordinary tensors instead of DTensors; rank 0's values are broadcast at the start; gradients are
divided here instead of by NCCL. Like torch, it has no second derivatives: backward frees what they
need. With float16, scale the loss by torch's `ShardedGradScaler`, because `GradScaler` looks for
infinities in this rank's rows only.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from miniddp.autograd_graph import at_end_of_backward, backward_is_running
from miniddp.comm import this_group
from miniddp.ddp import not_compiled
from miniddp.nested import cast as cast_tensors
from miniddp.nested import find_tensors
from miniddp.replicas import broadcast_tensors, verify_same_model
from miniddp.sharded.param import FSDPParam, Owner, used_in_pieces
from miniddp.sharded.param_group import FSDPParamGroup, Reduction, ShardedState
from miniddp.sharded.sharding import Sharding


class FSDPModule:
    """What `fully_shard` adds to a module's class."""

    fsdp_state: "FSDPState"

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether the next backwards reduce. If not, whole gradients accumulate on each rank."""
        for state in states_of(cast(nn.Module, self), recurse):
            state.group.requires_gradient_sync = requires_gradient_sync

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
            param.allocate()
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

    Raises ValueError for another mesh, for a module that has no forward or has been sharded, and
    for a parameter that cannot be divided or is tied to one that another call has sharded. Raises
    RuntimeError on every rank if the ranks' modules differ.
    """
    _check_callable(module)
    group, replicas = _groups_of(mesh)
    owners = _owners_of(module)
    for members in (group, replicas):
        if members is not None:
            _make_equal(module, owners, members)
    policy = mp_policy or MixedPrecisionPolicy()
    params = [
        FSDPParam(parameter, places, Sharding(parameter.shape, group, replicas), policy)
        for parameter, places in owners.items()
    ]
    param_group, kind = FSDPParamGroup(params, group, replicas), type(module)
    module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    module.fsdp_state = FSDPState(module, param_group, policy, reshard_after_forward)
    return module


def _check_callable(module: Any) -> None:
    """Raise unless `module` is one module, with a forward, that has not been sharded."""
    if not isinstance(module, nn.Module) or type(module).forward is nn.Module.forward:
        raise ValueError(
            f"a {type(module).__name__} is never called, so fully_shard cannot gather its "
            "parameters: pass each module in it, or the module whose forward calls them"
        )
    if isinstance(module, FSDPModule):
        raise ValueError(f"this {type(module).__name__} has been sharded already")


def _make_equal(
    module: nn.Module, owners: dict[nn.Parameter, list[Owner]], group: dist.ProcessGroup
) -> None:
    """Take the parameters of the group's rank 0, if all its ranks have the same module."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    named = {names[parameter]: parameter for parameter in owners}
    problem = _problem_with(named)
    verify_same_model(named, group, {"class": type(module).__name__}, problem)
    broadcast_tensors(list(owners), group, src=0)


def _groups_of(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The ranks that divide a parameter, and those that hold the same part of it."""
    if mesh is None:
        return this_group(None), None
    if mesh.ndim == 1:
        return mesh.get_group(0), None
    if mesh.ndim == 2:
        return mesh.get_group(1), mesh.get_group(0)
    raise ValueError(f"the mesh has {mesh.ndim} dimensions: take one, or two for HSDP")


def _owners_of(module: nn.Module) -> dict[nn.Parameter, list[Owner]]:
    """The parameters that are not yet sharded, with the places in which they are registered."""
    owners: dict[nn.Parameter, list[Owner]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
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


def states_of(module: nn.Module, recurse: bool = True) -> Iterator["FSDPState"]:
    """The states of `module` and its submodules, those that have been sharded."""
    for part in module.modules() if recurse else [module]:
        if isinstance(part, FSDPModule):
            yield part.fsdp_state


class Schedule:
    """What the modules below one root share: their order, and the reductions under way."""

    def __init__(self, module: nn.Module):
        self.module, self.states = module, list(states_of(module))
        for name, part in module.named_modules():
            if isinstance(part, FSDPModule):
                part.fsdp_state.schedule = self
                part.fsdp_state.group.set_name(f"{name or 'the model'} ({type(part).__name__})")
        self.root: FSDPState | None = None  # while its forward runs
        self.forward: list[FSDPState] = []  # in the order of this forward
        self.last_forward: list[FSDPState] = []
        self.awaiting: list[FSDPState] = []  # forwards that have not had their backward
        self.in_backward: set[FSDPState] = set()
        self.reductions: list[Reduction] = []

    def prefetch_in_forward(self, state: "FSDPState") -> None:
        """Gather for the module that followed in the last forward, if that began alike."""
        self.forward.append(state)
        place = len(self.forward)
        if self.last_forward[:place] == self.forward and place < len(self.last_forward):
            self.last_forward[place].group.unshard()

    def prefetch_in_backward(self, state: "FSDPState") -> None:
        """Gather for the module whose forward was the last one before `state`'s."""
        if state in self.awaiting:
            place = len(self.awaiting) - 1 - self.awaiting[::-1].index(state)
            del self.awaiting[place]
            if place > 0:
                self.awaiting[place - 1].group.unshard()

    def begin_forward(self, root: "FSDPState") -> None:
        """`root` is the outermost module. Forget a backward that raised."""
        self.root = root
        self.forward, self.last_forward = [], self.forward
        for state in self.states:
            # Whole since a forward without a backward: the optimizer may have stepped in between.
            state.group.reshard()
        if self.in_backward:
            for state in self.states:
                for param in state.group.params:
                    param.take_gradient()
            self.forget_backward()
        self.check_parameters()

    def check_parameters(self) -> None:
        """Raise ValueError if a parameter is in no group. All groups are sharded."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and not hasattr(parameter, "sharding"):
                raise ValueError(
                    f"{name} was added after fully_shard, so no group reduces its gradient, and "
                    "the ranks' values would diverge. Add it before, or call fully_shard on the "
                    "module that holds it"
                )

    def begin_backward(self, state: "FSDPState") -> None:
        """A gradient has arrived at `state`. The first one queues the end of backward."""
        if not self.in_backward:
            at_end_of_backward(self.end_backward)
        self.in_backward.add(state)

    def reduce(self, group: FSDPParamGroup) -> None:
        """Launch the reduction of a group's gradients. One message at a time has memory."""
        for reduction in self.reductions:
            reduction.free()
        self.reductions += group.reduce()

    def end_backward(self) -> None:
        """Reduce what no input's gradient has triggered, then wait for all reductions.

        Also reduces the groups that this backward did not reach, if unsynchronized ones did, and
        those that it reached without passing an output.
        """
        for state in self.states:
            if state.computes_gradients or state.group.has_gradient():
                state.reduce()
        for reduction in self.reductions:
            reduction.finish()
        for state in self.states:
            state.group.reshard()
        self.forget_backward()

    def forget_backward(self) -> None:
        """No backward runs, and no forward waits for one."""
        for state in self.states:
            state.computes_gradients = False
        self.awaiting, self.in_backward, self.reductions = [], set(), []


class FSDPState:
    """The hooks of one sharded module."""

    def __init__(
        self,
        module: nn.Module,
        group: FSDPParamGroup,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ):
        self.group, self.reshard_after_forward = group, reshard_after_forward
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype
        # From the first gradient of an output until those of all inputs. A forward during this
        # time is activation checkpointing's.
        self.computes_gradients = False
        self.schedule: Schedule | None = None  # made by the first forward of the outermost module
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        # After an exception, too: the next forward must find the schedule without a root.
        module.register_forward_hook(self.post_forward, always_call=True)
        for param in group.params:
            param.on_gradient = lambda parameter: self.schedule.begin_backward(self)
        for part in {part for param in group.params for part, _ in param.owners}:
            part.register_forward_pre_hook(self.refuse_shards)

    # 1. Forward -----------------------------------------------------------------------------------

    @not_compiled
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather the parameters. The outermost module begins a forward of all."""
        schedule = self.schedule or Schedule(module)
        outermost = schedule.root is None
        if outermost and not backward_is_running():  # there, a checkpoint recomputes
            schedule.begin_forward(self)
        self.gather()
        args, kwargs = cast_tensors((args, kwargs), self.input_dtype)
        if self.computes_gradients:
            return args, kwargs
        schedule.prefetch_in_forward(self)
        inputs = [t for t in find_tensors((args, kwargs)) if t.grad_fn is not None]
        if inputs and torch.is_grad_enabled():
            register_multi_grad_hook(inputs, self.post_backward, mode="all")
        return args, kwargs

    @not_compiled
    def refuse_shards(self, module: nn.Module, args: Any) -> None:
        """Raise RuntimeError if a part of the module is called while its parameters are sharded."""
        if self.group.sharded_state is not ShardedState.UNSHARDED:
            raise used_in_pieces(f"a {type(module).__name__}")

    def gather(self) -> None:
        """Let the module have its whole parameters."""
        self.group.unshard()
        self.group.wait_for_unshard()

    @not_compiled
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Free the parameters, and watch for the first gradient of an output."""
        schedule, result = self.schedule, cast_tensors(output, self.output_dtype)
        if self.computes_gradients:
            return result
        outermost = schedule is not None and schedule.root is self
        free = self.reshard_after_forward
        if (not outermost if free is None else free) or not torch.is_grad_enabled():
            self.group.reshard()
        outputs = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
        if outputs and torch.is_grad_enabled():
            register_multi_grad_hook(outputs, self.pre_backward, mode="any")
            schedule.awaiting.append(self)
        if outermost:
            schedule.root = None
        return result

    # 2. Backward ----------------------------------------------------------------------------------

    def pre_backward(self, gradient: Tensor) -> None:
        """The first gradient of an output has arrived: gather the parameters again."""
        self.schedule.begin_backward(self)
        self.computes_gradients = True
        self.gather()
        self.schedule.prefetch_in_backward(self)

    def post_backward(self, gradients: Any = None) -> None:
        """The gradients of all inputs exist: free the parameters and reduce their gradients.

        Not yet, if another forward of this module awaits its backward. Safe to call more than once.
        """
        if self.computes_gradients and self not in self.schedule.awaiting:
            self.reduce()

    def reduce(self) -> None:
        """Free the parameters, and reduce their gradients or keep them whole."""
        self.computes_gradients = False
        self.group.reshard()
        if self.group.requires_gradient_sync:
            self.schedule.reduce(self.group)
        else:
            for param in self.group.params:  # whole, on this rank
                param.accumulate_unsharded()
