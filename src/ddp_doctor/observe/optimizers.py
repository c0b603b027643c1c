"""Optimizers: their parameters, when they step, and when gradients are cleared."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_doctor.fingerprints import projection
from ddp_doctor.observe.recorder import MAX_PARAMETERS, Recorder
from ddp_doctor.patching import Patches
from ddp_doctor.places import place


def install(recorder: Recorder, patches: Patches) -> None:
    session = recorder.session

    def made(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.add_optimizer(args[0])

    @session.guard
    def update(optimizer: Any) -> None:
        recorder.before_update(recorder.add_optimizer(optimizer))

    @session.guard
    def before(optimizer: Any, closure: Any) -> Any:
        if id(optimizer) in recorder.in_step:  # its last step raised, and never came to its end
            del recorder.in_step[recorder.in_step.index(id(optimizer)) :]
        recorder.in_step.append(id(optimizer))
        if len(recorder.in_step) > 1:
            return None
        recorder.open()
        state = recorder.add_optimizer(optimizer)
        session.doing(f"optimizer step {state.steps}")
        if recorder.in_backward and recorder.holds_local_gradients(state):
            recorder.window["stepped_in_backward"] = place()
        if recorder.on:
            recorder.window["step_place"] = place()
        if closure is None:
            recorder.before_update(state)
            return None

        def closure_then_look() -> Any:
            loss = closure()
            update(optimizer)
            return loss

        return closure_then_look

    def step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        wrapped = before(optimizer, closure if callable(closure) else None)
        if wrapped is None:
            return None
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    @session.guard
    def after(optimizer: Any) -> None:
        del recorder.in_step[-1:]
        if not recorder.in_step:
            state = recorder.add_optimizer(optimizer)
            recorder.after_update(state)
            # The gradients that this step has used: what is still there later was never cleared.
            for parameter in state.parameters()[:MAX_PARAMETERS] if recorder.on else ():
                grad = parameter.grad
                recorder.used[id(parameter)] = None if grad is None else projection(grad)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        after(optimizer)

    def cleared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = recorder.optimizers.get(id(args[0]))
        if state is not None:
            _forget(state)

    def module_cleared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside = {id(parameter) for parameter in args[0].parameters()}
        for state in recorder.optimizers.values():
            if any(id(parameter) in inside for parameter in state.parameters()):
                _forget(state)

    def _forget(state: Any) -> None:
        # A backward that another optimizer has used, or will use, is not lost: a GAN's.
        kept = [
            record
            for other in recorder.optimizers.values()
            if other is not state
            for record in other.pending
        ]
        for backward in state.pending if recorder.on else ():
            dropped = recorder.window.setdefault("dropped", [])
            in_use = backward.get("used") or any(backward is other for other in kept)
            if not in_use and len(dropped) < 64:
                targets = [term["target"] for term in backward["terms"] if "target" in term]
                fact = {"optimizer": state.index, "call": backward["call"], "targets": targets}
                dropped.append(fact)
        state.forget()
        for parameter in state.parameters():
            recorder.local.pop(id(parameter), None)

    patches.hold(register_optimizer_step_pre_hook(step))
    patches.hold(register_optimizer_step_post_hook(stepped))
    patches.observe(Optimizer, "__init__", after=made)
    patches.observe(Optimizer, "zero_grad", cleared)
    patches.observe(nn.Module, "zero_grad", module_cleared)
