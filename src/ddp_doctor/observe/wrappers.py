"""DistributedDataParallel and wrappers that look like it: made when, called when, synced or not."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_doctor.facts.containers import tensors_in
from ddp_doctor.facts.fingerprints import checksum
from ddp_doctor.facts.places import place
from ddp_doctor.facts.types import ForwardFact, WrapperFact
from ddp_doctor.observe.models import live_modules
from ddp_doctor.observe.patching import Args, Kwargs, Patches
from ddp_doctor.observe.random_numbers import note_state
from ddp_doctor.observe.recorder import Recorder, ranks
from ddp_doctor.observe.states import WrapperState


def install(recorder: Recorder, patches: Patches) -> None:
    of = _Wrappers(recorder, patches)
    patches.hold(of.handle)
    patches.observe(Join, "__enter__", of.joining)
    patches.observe(DistributedDataParallel, "__init__", after=of.made)
    patches.observe(DistributedDataParallel, "forward", of.forward, of.forwarded)


class _Wrappers:
    """The wrappers of one process, torch's and others'."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self.recorder, self.patches = recorder, patches
        self.known: set[type] = {DistributedDataParallel}
        self.looked: set[int] = set()  # how many backwards had run then
        self.first_forwards = recorder.session.guard(self._first_forwards)
        register = torch.nn.modules.module.register_module_forward_pre_hook
        self.handle = register(lambda module, args: self.first_forwards(module, args))

    def made(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        self._note(args[0])

    def forward(self, args: Args, kwargs: Kwargs) -> None:
        self._called(args[0], args[1:], kwargs)

    def forwarded(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        self.recorder.session.set_status("after forward")

    def joining(self, args: Args, kwargs: Kwargs) -> None:
        self.recorder.open()
        self.recorder.session.write("join")

    def _first_forwards(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Before a step's first forward, look for other libraries' wrappers, unless there are some.

        They are recognized by what they have; then their class is observed.
        """
        recorder, now = self.recorder, self.recorder.backward_count
        if now in self.looked or not torch.is_grad_enabled() or ranks() < 2:
            return
        self.looked.add(now)
        if len(self.looked) > 2:
            self.handle.remove()
        found = [] if recorder.wrappers else wrappers_like_ddp()
        for wrapper in found:
            self._note(wrapper)
        for wrapper in [each for each in found if not self.known & set(type(each).__mro__)]:
            if type(wrapper) not in self.known:
                self.known.add(type(wrapper))
                self.patches.observe(type(wrapper), "forward", self.forward, self.forwarded)
            if wrapper is module:  # its class was not observed when it was called
                self._called(wrapper, args, {})

    def _note(self, wrapper: Any) -> None:
        """Write down how a wrapper was made. Idempotent."""
        recorder, module = self.recorder, getattr(wrapper, "module", None)
        if not isinstance(module, torch.nn.Module) or recorder.wrapper_of(module) is not None:
            return
        recorder.open()
        state = WrapperState(wrapper, module, len(recorder.wrappers))
        recorder.wrappers.append(state)
        fact = WrapperFact(
            index=state.index,
            world=dist.get_world_size(getattr(wrapper, "process_group", None)),
            of=dist.get_world_size(),
            broadcast_buffers=bool(getattr(wrapper, "broadcast_buffers", True)),
            ignored=sorted(state.ignored)[:200],
            manual=getattr(module, "automatic_optimization", True) is False,
            place=place(),
        )
        recorder.session.write("wrapper", **fact)

    def _called(self, wrapper: Any, args: Args, kwargs: Kwargs) -> None:
        recorder = self.recorder
        recorder.session.set_status("forward")
        state = recorder.wrapper_of(getattr(wrapper, "module", None))
        if state is None or not torch.is_grad_enabled():
            return
        state.prepared = bool(getattr(wrapper, "require_backward_grad_sync", True))
        if recorder.on and len(recorder.window["forwards"]) < 64:
            at = place()
            recorder.session.set_status(f"forward at {at}")
            recorder.window["forwards"].append(ForwardFact(sync=state.prepared, place=at))
            recorder.window["inputs"].append(_inputs(args, kwargs))
            note_state(recorder)


def wrappers_like_ddp() -> list[torch.nn.Module]:
    """Live modules that hold one module as `.module` and can leave synchronization out."""
    return [
        candidate
        for candidate in live_modules()
        if isinstance(candidate._modules.get("module"), torch.nn.Module)
        and callable(getattr(type(candidate), "no_sync", None))
        and "FullySharded" not in type(candidate).__name__
    ]


def _inputs(args: Args, kwargs: Kwargs) -> list[list[Any]]:
    """Hash, size and shape of each tensor that a forward was given, also inside of objects."""
    return [
        [checksum(tensor, 1 << 22), tensor.numel(), list(tensor.shape)[:6]]
        for tensor in tensors_in((*args, *kwargs.values()))
    ]
