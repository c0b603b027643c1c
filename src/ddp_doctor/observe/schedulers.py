"""Learning-rate schedulers: how often they step, and the rates that they set."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.patching import Patches
from ddp_doctor.places import place

MAX_FACTS = 400


def install(recorder: Recorder, patches: Patches) -> None:
    session = recorder.session
    counts: dict[int, int] = {}

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        scheduler = args[0]
        return hasattr(scheduler, "_last_lr")  # the first step is the constructor's

    def after(counted: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not counted:
            return
        scheduler = args[0]
        counts[id(scheduler)] = counts.get(id(scheduler), 0) + 1
        if counts[id(scheduler)] > MAX_FACTS:
            return
        rates = scheduler.get_last_lr()
        session.write(
            "schedule",
            scheduler=id(scheduler) % 100_000,
            type=type(scheduler).__name__,
            count=counts[id(scheduler)],
            steps=session.step_count,
            total=getattr(scheduler, "T_max", getattr(scheduler, "total_steps", None)),
            rate=float(rates[0]) if rates else None,
            place=place(),
        )

    patches.observe(LRScheduler, "step", before, after)
