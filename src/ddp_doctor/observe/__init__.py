"""One file per thing observed. `install` replaces torch's functions by observed ones.

An observer costs nothing visible on a step that is not observed: one comparison per call.
"""

from typing import TYPE_CHECKING

from ddp_doctor.observe import (
    backward,
    clipping,
    collectives,
    data,
    groups,
    losses,
    optimizers,
    random_numbers,
    reads,
    scaler,
    schedulers,
    wrappers,
)
from ddp_doctor.patching import Patches

if TYPE_CHECKING:
    from ddp_doctor.session import Session


def install(session: "Session") -> Patches:
    """Observe everything from now on."""
    patches = Patches(session.guard)
    for part in (
        groups,
        collectives,
        wrappers,
        optimizers,
        losses,
        reads,
        backward,
        clipping,
        scaler,
        schedulers,
        data,
        random_numbers,
    ):
        part.install(session, patches)
    return patches
