"""Learning-rate schedulers: how often they step, and the rates that they set."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ddp_doctor.facts.places import place
from ddp_doctor.facts.types import ScheduleFact
from ddp_doctor.observe.patching import Patches
from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.observe.states import Numbers

DENSE = 200  # calls that are all written down; later ones ever more rarely


def install(recorder: Recorder, patches: Patches) -> None:
    session = recorder.session
    schedulers = Numbers()
    counts: dict[int, int] = {}

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        scheduler = args[0]
        return hasattr(scheduler, "_last_lr")  # the first step is the constructor's

    def after(counted: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not counted:
            return
        scheduler = args[0]
        number = schedulers.of(scheduler)
        count = counts[number] = counts.get(number, 0) + 1
        if count > DENSE and count % 10 ** (len(str(count)) - 2):
            return
        rates = scheduler.get_last_lr()
        fact = ScheduleFact(
            scheduler=number,
            count=count,
            steps=session.step_count,
            backwards=recorder.backward_count,
            total=getattr(scheduler, "T_max", getattr(scheduler, "total_steps", None)),
            rate=float(rates[0]) if rates else None,
            place=place(),
        )
        session.write("schedule", **fact)

    patches.observe(LRScheduler, "step", before, after)
