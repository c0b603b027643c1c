"""The state of one sharded module, and its hooks, which let its group gather, free, and reduce.

Source: FSDPState in torch's _fsdp_state.py.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import MixedPrecisionPolicy

from miniddp.ddp import disable_dynamo
from miniddp.nested import cast_floating, find_tensors, replace_tensors
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
            param.on_gradient = lambda parameter: self.schedule.note_backward(self)
        for part in {part for param in group.params for part, _ in param.owners}:
            part.register_forward_pre_hook(self.refuse_shards)

    # 1. Forward -----------------------------------------------------------------------------------

    @disable_dynamo
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather the parameters. The outermost module begins a forward of all."""
        schedule = self.schedule or Schedule(module, self)
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint recomputes, in backward
            if schedule.root.training_state is not TrainingState.FORWARD:
                schedule.begin_forward(self)
            self.training_state = TrainingState.FORWARD
        self.group.unshard()
        self.group.wait_for_unshard()
        if self.training_state is TrainingState.FORWARD:
            schedule.prefetch_in_forward(self)
        args, kwargs = cast_floating((args, kwargs), self.input_dtype)
        if self.training_state is not TrainingState.PRE_BACKWARD and torch.is_grad_enabled():
            args, kwargs = self.watch_inputs((args, kwargs))
        return args, kwargs

    def watch_inputs(self, inputs: Any) -> Any:
        """Call `post_backward` once the gradients of all inputs exist."""
        tensors = find_tensors(inputs)
        if any(tensor.requires_grad and tensor.is_leaf for tensor in tensors):
            # A hook on a leaf would run before the gradients of the parameters are there.
            tensors = [t.view_as(t) if t.requires_grad and t.is_leaf else t for t in tensors]
            inputs = replace_tensors(inputs, iter(tensors))
        tracked = [tensor for tensor in tensors if tensor.requires_grad]
        if len(tracked) == 1:
            tracked[0].register_hook(self.post_backward)
        elif tracked:
            # Its hooks keep each other's nodes: without a backward, the graph is not freed at once.
            register_multi_grad_hook(tracked, self.post_backward, mode="all")
        return inputs

    @disable_dynamo
    def refuse_shards(self, module: nn.Module, args: Any) -> None:
        """Raise RuntimeError if a part of the module is called while its parameters are sharded."""
        if self.group.sharded_state is not ShardedState.UNSHARDED:
            raise used_while_sharded(f"a {type(module).__name__}")

    @disable_dynamo
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Free the parameters, except in a recomputation. Watch for an output's gradient."""
        if self.training_state is TrainingState.PRE_BACKWARD:
            return cast_floating(output, self.output_dtype)
        if self.training_state is TrainingState.FORWARD:
            self.training_state = TrainingState.IDLE
            self.schedule.post_forward_order.append(self)
            free = self.reshard_after_forward
            if free is None:
                free = self.schedule.root is not self
            if free or not torch.is_grad_enabled():
                self.group.reshard()
        outputs = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
        if outputs and torch.is_grad_enabled():
            register_multi_grad_hook(outputs, self.pre_backward, mode="any")
        return cast_floating(output, self.output_dtype)

    # 2. Backward ----------------------------------------------------------------------------------

    def pre_backward(self, gradient: Tensor) -> None:
        """The first gradient of an output has arrived: gather the parameters again."""
        self.schedule.note_backward(self)
        self.training_state = TrainingState.PRE_BACKWARD
        self.group.unshard()
        self.group.wait_for_unshard()
        self.schedule.prefetch_in_backward(self)

    def post_backward(self, gradients: Any) -> None:
        """The gradients of all inputs exist: free the parameters and reduce their gradients.

        As in torch, once per forward: parameters are not kept whole until the backward of another.
        """
        if self.training_state is TrainingState.PRE_BACKWARD:
            self.reshard_and_reduce()

    def reshard_and_reduce(self) -> None:
        """Free the parameters, and reduce their gradients or keep them whole."""
        self.training_state = TrainingState.POST_BACKWARD
        self.group.reshard()
        if self.group.requires_gradient_sync:
            self.schedule.launch_reduction(self.group)
        else:
            for param in self.group.params:  # whole, on this rank
                param.accumulate_unsharded()
