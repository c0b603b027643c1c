"""Optimizers: their parameters, when they step, and when gradients are cleared."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_doctor.facts.fingerprints import projection
from ddp_doctor.facts.places import place
from ddp_doctor.observe.patching import Args, Kwargs, Patches
from ddp_doctor.observe.recorder import MAX_PARAMETERS, Recorder
from ddp_doctor.observe.states import OptimizerState


def install(recorder: Recorder, patches: Patches) -> None:
    of = _Steps(recorder)
    patches.hold(register_optimizer_step_pre_hook(of.step))
    patches.hold(register_optimizer_step_post_hook(recorder.session.guard(of.stepped)))
    patches.observe(Optimizer, "__init__", after=of.made)
    patches.observe(Optimizer, "zero_grad", of.cleared)
    patches.observe(nn.Module, "zero_grad", of.module_cleared)


class _Steps:
    """The steps of one process's optimizers."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        guard = recorder.session.guard
        self.before, self.update = guard(self._before), guard(self._update)

    def made(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        self.recorder.add_optimizer(args[0])

    def step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Before a step; its arguments, if the closure among them has to be followed."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not self.before(optimizer, callable(closure)):
            return None

        def closure_then_look() -> Any:
            loss = closure()
            self.update(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_look, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_look}

    def _before(self, optimizer: Any, by_closure: bool) -> bool:
        """Whether the gradients are there only after the closure has run."""
        recorder = self.recorder
        if id(optimizer) in recorder.in_step:  # its last step raised, and never came to its end
            del recorder.in_step[recorder.in_step.index(id(optimizer)) :]
        recorder.in_step.append(id(optimizer))
        if len(recorder.in_step) > 1:
            return False
        recorder.open()
        state = recorder.add_optimizer(optimizer)
        recorder.session.set_status(f"optimizer step {state.steps}")
        if recorder.in_backward and recorder.holds_local_gradients(state):
            recorder.window["stepped_in_backward"] = place()
        if recorder.on:
            recorder.window["step_place"] = place()
        if not by_closure:
            recorder.before_update(state)
        return by_closure

    def _update(self, optimizer: Any) -> None:
        self.recorder.before_update(self.recorder.add_optimizer(optimizer))

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        del recorder.in_step[-1:]
        if recorder.in_step:
            return
        state = recorder.add_optimizer(optimizer)
        recorder.after_update(state)
        # The gradients that this step has used: what is still there later was never cleared.
        for parameter in state.parameters()[:MAX_PARAMETERS] if recorder.on else ():
            grad = parameter.grad
            recorder.used[id(parameter)] = None if grad is None else projection(grad)

    def cleared(self, args: Args, kwargs: Kwargs) -> None:
        """An optimizer has cleared its gradients."""
        state = self.recorder.optimizers.get(id(args[0]))
        if state is not None:
            self._forget(state)

    def module_cleared(self, args: Args, kwargs: Kwargs) -> None:
        """A module has cleared its gradients."""
        inside = {id(parameter) for parameter in args[0].parameters()}
        for state in self.recorder.optimizers.values():
            if any(id(parameter) in inside for parameter in state.parameters()):
                self._forget(state)

    def _forget(self, state: OptimizerState) -> None:
        recorder = self.recorder
        others = [each for each in recorder.optimizers.values() if each is not state]
        # A backward that another optimizer has used, or will use, is not lost: a GAN's.
        kept = {id(record) for other in others for record in other.pending}
        state.cleared += sum(not b.get("used") and id(b) not in kept for b in state.pending)
        state.forget()
        for parameter in state.parameters():
            recorder.local.pop(id(parameter), None)
