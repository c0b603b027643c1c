"""The museum: known broken data-parallel implementations, each wrong in one way.

    for exhibit in exhibits():
        print(exhibit.name, exhibit.bug, exhibit.caught_by)

Each is short, looks harmless, and shows a loss curve that falls. They are common mistakes,
rewritten for this book; none is copied from a project. Use them to learn what a mistake looks like,
and to try your own tests: a test suite that passes on an exhibit has a hole.

Exhibits share their correct parts, which are in `labkit.testing.museum.parts`.
"""

from labkit.testing.museum import after_backward, around_ddp, in_hooks, in_pieces, in_the_loss
from labkit.testing.museum.parts import Exhibit

__all__ = ["Exhibit", "exhibits"]


def exhibits() -> tuple[Exhibit, ...]:
    """Every exhibit, sorted by name."""
    rooms = (after_backward, around_ddp, in_hooks, in_pieces, in_the_loss)
    labels = [exhibit for room in rooms for exhibit in room.EXHIBITS]
    return tuple(sorted(labels, key=lambda exhibit: exhibit.name))
