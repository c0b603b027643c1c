"""When the groups below one root move: prefetching, and the end of backward.

Two gathers are prefetched: in forward, that of the group that came next in the last forward; in
backward, that of the group that ran before this one. Source: FSDPStateContext in _fsdp_state.py and
FSDPCommContext in _fsdp_param_group.py of torch.
"""

from collections.abc import Iterator
from enum import Enum, auto
from typing import Protocol

from torch import nn

from miniddp.autograd_graph import at_end_of_backward
from miniddp.sharded.param_group import FSDPParamGroup


class TrainingState(Enum):
    """What one sharded module is doing."""

    # No forward and no backward of it runs. Earlier forwards may still await their backward.
    IDLE = auto()
    # Its forward runs, and no backward does.
    FORWARD = auto()
    # A gradient of an output has arrived, and not yet the gradients of all inputs: the parameters
    # are whole. A forward in this state is a recomputation by activation checkpointing.
    PRE_BACKWARD = auto()
    # Gradients of its parameters exist, and the backward goes on elsewhere. They are being reduced,
    # or wait for the end of the backward.
    POST_BACKWARD = auto()


IN_BACKWARD = (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)


class Scheduled(Protocol):
    """One sharded module, as its schedule sees it: a `miniddp.sharded.fsdp_state.FSDPState`."""

    group: FSDPParamGroup
    training_state: TrainingState
    schedule: "Schedule | None"

    def reshard_and_reduce(self) -> None: ...


def states_of(module: nn.Module, recurse: bool = True) -> Iterator[Scheduled]:
    """The states of `module` and its submodules, those that have been sharded."""
    for part in module.modules() if recurse else [module]:
        if (state := getattr(part, "fsdp_state", None)) is not None:
            yield state


class Schedule:
    """What the modules below one root share: their order, and the reductions under way.

    Made by the first forward of `module`, the outermost one; `root` is its state.
    """

    def __init__(self, module: nn.Module, root: Scheduled):
        self.module, self.states = module, list(states_of(module))
        for name, part in module.named_modules():
            for state in states_of(part, recurse=False):
                state.schedule = self
                state.group.name = f"{name or 'the model'} ({type(part).__name__})"
        self.root = root  # of the last forward: a part of the model may be called alone
        self.forward_order: list[Scheduled] = []  # of this forward
        self.last_forward_order: list[Scheduled] = []
        self.post_forward_order: list[Scheduled] = []  # of this forward: in which modules ended
        self.place = 0  # in it, of the module that began its backward last
        self.reducing: list[FSDPParamGroup] = []

    # 1. Forward -----------------------------------------------------------------------------------

    def begin_forward(self, root: Scheduled) -> None:
        """`root` is the outermost module. A step with a backward that raised is lost, all of it."""
        self.root = root
        self.forward_order, self.last_forward_order = [], self.forward_order
        self.post_forward_order, self.place = [], 0
        for state in self.states:
            # Whole since a forward without a backward: the optimizer may have stepped in between.
            state.group.reshard()
        if self.backward_has_begun():
            for param in [param for state in self.states for param in state.group.params]:
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

    def prefetch_in_forward(self, state: Scheduled) -> None:
        """Gather for the module that followed in the last forward, if that began alike."""
        self.forward_order.append(state)
        place = len(self.forward_order)
        last = self.last_forward_order
        if last[:place] == self.forward_order and place < len(last):
            last[place].group.unshard()

    # 2. Backward ----------------------------------------------------------------------------------

    def backward_has_begun(self) -> bool:
        """Whether a gradient has arrived since the last end of a backward."""
        return any(state.training_state in IN_BACKWARD for state in self.states)

    def note_backward(self, state: Scheduled) -> None:
        """A gradient has arrived at `state`. The first one queues the end of backward."""
        if state.training_state in IN_BACKWARD:
            return
        if not self.backward_has_begun():
            at_end_of_backward(self.end_backward)
        state.training_state = TrainingState.POST_BACKWARD

    def prefetch_in_backward(self, state: Scheduled) -> None:
        """Gather for the module whose forward was the last one before `state`'s."""
        order = self.post_forward_order
        places = [place for place, other in enumerate(order) if other is state]
        if places:
            # If there is none before: the backward of an earlier, equal forward begins.
            self.place = max([place for place in places if place < self.place] or places)
            if self.place > 0:
                order[self.place - 1].group.unshard()

    def launch_reduction(self, group: FSDPParamGroup) -> None:
        """Launch the reduction of a group's gradients. One message at a time has memory."""
        for earlier in self.reducing:
            earlier.wait_for_reduce_scatter()
        group.launch_reduce_scatter()
        if group not in self.reducing:
            self.reducing.append(group)

    def end_backward(self) -> None:
        """Reduce what no input's gradient has triggered, then wait for all reductions.

        Also reduces the groups that this backward did not reach, if unsynchronized ones did, and
        those that it reached without passing an output.
        """
        for state in self.states:
            computing = state.training_state is TrainingState.PRE_BACKWARD
            if computing or state.group.has_gradient():
                state.reshard_and_reduce()
        for group in self.reducing:
            group.finish_reduction()
        for state in self.states:
            state.group.reshard()
        self.forget_backward()

    def forget_backward(self) -> None:
        """No backward runs, and no forward waits for one."""
        for state in self.states:
            state.training_state = TrainingState.IDLE
            state.group.reductions = []
        self.place, self.reducing = 0, []
