"""Import what stays until the end, such as torch, without the garbage collector.

Loading torch makes a million objects. The collector walks through them again and again and frees
none: a quarter of the import's processor time. `gc.freeze` then takes them out of its later walks.
So it also leaves the memory that a fork shares with its parent as it is, instead of copying it.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Turn the collector off inside the block, and freeze at its end every object that is there.

    Blocks may be nested; the outermost one turns the collector on again, if it was on.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
