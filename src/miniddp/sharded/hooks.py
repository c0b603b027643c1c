"""The hooks of one sharded module: they let its group gather, free, and reduce.

Source: FSDPState in torch's _fsdp_state.py.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import MixedPrecisionPolicy

from miniddp.autograd_graph import backward_is_running
from miniddp.ddp import not_compiled
from miniddp.nested import cast, find_tensors
from miniddp.sharded.param import used_while_sharded
from miniddp.sharded.param_group import FSDPParamGroup, ShardedState
from miniddp.sharded.schedule import Schedule, TrainingState


class FSDPState:
    """What one sharded module is doing, and its hooks."""

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
        self.training_state = TrainingState.IDLE
        self.schedule: Schedule | None = None  # made by the first forward of the outermost module
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        # After an exception, too: the next forward must find that none runs.
        module.register_forward_hook(self.post_forward, always_call=True)
        for param in group.params:
            param.on_gradient = lambda parameter: self.schedule.begin_backward(self)
        for part in {part for param in group.params for part, _ in param.owners}:
            part.register_forward_pre_hook(self.refuse_shards)

    # 1. Forward -----------------------------------------------------------------------------------

    @not_compiled
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather the parameters. The outermost module begins a forward of all."""
        schedule = self.schedule or Schedule(module, self)
        if not backward_is_running():  # otherwise a checkpoint recomputes
            if schedule.root.training_state is not TrainingState.FORWARD:
                schedule.begin_forward(self)
            self.training_state = TrainingState.FORWARD
        self.gather()
        args, kwargs = cast((args, kwargs), self.input_dtype)
        if self.training_state is TrainingState.PRE_BACKWARD:
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
            raise used_while_sharded(f"a {type(module).__name__}")

    def gather(self) -> None:
        """Let the module have its whole parameters."""
        self.group.unshard()
        self.group.wait_for_unshard()

    @not_compiled
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Free the parameters, and watch for the first gradient of an output."""
        result = cast(output, self.output_dtype)
        if self.training_state is TrainingState.PRE_BACKWARD:
            return result
        forward_ends = self.training_state is TrainingState.FORWARD
        if forward_ends:
            self.training_state = TrainingState.IDLE
        free = self.reshard_after_forward
        if free is None:
            free = not (forward_ends and self.schedule.root is self)
        if free or not torch.is_grad_enabled():
            self.group.reshard()
        outputs = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
        if outputs and torch.is_grad_enabled():
            register_multi_grad_hook(outputs, self.pre_backward, mode="any")
            self.schedule.post_forward_order.append(self)
        return result

    # 2. Backward ----------------------------------------------------------------------------------

    def pre_backward(self, gradient: Tensor) -> None:
        """The first gradient of an output has arrived: gather the parameters again."""
        self.schedule.begin_backward(self)
        self.training_state = TrainingState.PRE_BACKWARD
        self.gather()
        self.schedule.prefetch_in_backward(self)

    def post_backward(self, gradients: Any = None) -> None:
        """The gradients of all inputs exist: free the parameters and reduce their gradients.

        Not yet, if another forward of this module awaits its backward. Safe to call more than once.
        """
        computing = self.training_state is TrainingState.PRE_BACKWARD
        if computing and self not in self.schedule.post_forward_order:
            self.reduce()

    def reduce(self) -> None:
        """Free the parameters, and reduce their gradients or keep them whole."""
        self.training_state = TrainingState.POST_BACKWARD
        self.group.reshard()
        if self.group.requires_gradient_sync:
            self.schedule.reduce(self.group)
        else:
            for param in self.group.params:  # whole, on this rank
                param.accumulate_unsharded()
