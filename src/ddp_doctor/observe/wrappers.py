"""DistributedDataParallel and wrappers that look like it: made when, called when, synced or not."""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_doctor.fingerprints import checksum
from ddp_doctor.observe.batches import tensors_in
from ddp_doctor.observe.random_numbers import note_state
from ddp_doctor.observe.recorder import Recorder, ranks
from ddp_doctor.observe.states import WrapperState
from ddp_doctor.patching import Patches
from ddp_doctor.places import place


def install(recorder: Recorder, patches: Patches) -> None:
    session = recorder.session

    def made(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _made(recorder, args[0])

    def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _called(recorder, args[0], args[1:], kwargs)

    def forwarded(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.doing("after forward")

    def joining(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.open()
        session.write("join")

    known_classes: set[type] = {DistributedDataParallel}
    looked: set[int] = set()  # how many backwards had run then

    @session.guard
    def first_forwards(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Before a step's first forward, look for other libraries' wrappers, unless there are some.

        They are recognized by what they have; then their class is observed.
        """
        if recorder.backward_count in looked or not torch.is_grad_enabled() or ranks() < 2:
            return
        looked.add(recorder.backward_count)
        if len(looked) > 2:
            handle.remove()
        found = [] if recorder.wrappers else wrappers_like_ddp()
        for wrapper in found:
            _made(recorder, wrapper)
        for wrapper in [each for each in found if not known_classes & set(type(each).__mro__)]:
            if type(wrapper) not in known_classes:
                known_classes.add(type(wrapper))
                patches.observe(type(wrapper), "forward", forward, forwarded)
            if wrapper is module:  # its class was not observed when it was called
                _called(recorder, wrapper, args, {})

    def before_forward(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        first_forwards(module, args)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    patches.hold(handle)
    patches.observe(Join, "__enter__", joining)
    patches.observe(DistributedDataParallel, "__init__", after=made)
    patches.observe(DistributedDataParallel, "forward", forward, forwarded)


def _made(recorder: Recorder, wrapper: Any) -> None:
    """Write down how a wrapper was made. Idempotent."""
    module = getattr(wrapper, "module", None)
    if not isinstance(module, torch.nn.Module) or recorder.wrapper_of(module) is not None:
        return
    recorder.open()
    state = WrapperState(wrapper, module, len(recorder.wrappers))
    recorder.wrappers.append(state)
    recorder.session.write(
        "wrapper",
        index=state.index,
        world=dist.get_world_size(getattr(wrapper, "process_group", None)),
        of=dist.get_world_size(),
        static_graph=bool(getattr(wrapper, "static_graph", False)),
        broadcast_buffers=bool(getattr(wrapper, "broadcast_buffers", True)),
        ignored=sorted(state.ignored)[:200],
        place=place(),
    )


def _called(
    recorder: Recorder, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    recorder.session.doing("forward")
    state = recorder.wrapper_of(getattr(wrapper, "module", None))
    if state is None or not torch.is_grad_enabled():
        return
    state.prepared = bool(getattr(wrapper, "require_backward_grad_sync", True))
    if recorder.on and len(recorder.window["forwards"]) < 64:
        at = place()
        recorder.session.doing(f"forward at {at}")
        fact = {"wrapper": state.index, "sync": state.prepared, "place": at}
        recorder.window["forwards"].append(fact)
        recorder.window["inputs"].append(_inputs(args, kwargs))
        note_state(recorder)


def wrappers_like_ddp() -> list[torch.nn.Module]:
    """Live modules that hold one module as `.module` and can leave synchronization out."""
    found = []
    for candidate in gc.get_objects():
        kind: Any = type(candidate)
        if not issubclass(kind, torch.nn.Module) or "_modules" not in candidate.__dict__:
            continue
        inner = candidate.__dict__["_modules"].get("module")
        if isinstance(inner, torch.nn.Module) and callable(getattr(kind, "no_sync", None)):
            found.append(candidate)
    return [candidate for candidate in found if "FullySharded" not in type(candidate).__name__]


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Any]]:
    """Hash, size and shape of each tensor that a forward was given, also inside of objects."""
    return [
        [checksum(tensor, 1 << 22), tensor.numel(), list(tensor.shape)[:6]]
        for tensor in tensors_in((*args, *kwargs.values()))
    ]
