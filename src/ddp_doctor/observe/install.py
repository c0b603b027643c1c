"""`install` replaces torch's functions by observed ones.

What a step costs that is not observed: a comparison per tensor operation; a few microseconds and a
write per collective, backward, and batch; and a checksum of a few parameters.
"""

from ddp_doctor.observe import (
    backward,
    collectives,
    data,
    losses,
    optimizers,
    random_numbers,
    updates,
    wrappers,
)
from ddp_doctor.observe.patching import Patches
from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.observe.session import Session

PARTS = (collectives, wrappers, optimizers, losses, backward, updates, data, random_numbers)


def install(session: Session) -> Patches:
    """Observe everything from now on. Called again after `undo`, it continues the same record."""
    recorder = session.recorder if isinstance(session.recorder, Recorder) else Recorder(session)
    session.recorder = recorder
    patches = Patches(session.guard)
    for part in PARTS:
        part.install(recorder, patches)
    return patches
