"""The museum: known broken data-parallel implementations, one per file, each wrong in one way.

    for exhibit in exhibits():
        print(exhibit.name, exhibit.bug, exhibit.caught_by)

Each is short, looks harmless, and shows a loss curve that falls. They are common mistakes,
rewritten for this book; none is copied from a project. Use them to learn what a mistake looks like,
and to try your own tests: a test suite that passes on an exhibit has a hole.

Exhibits share their correct parts, which are in `labkit.testing.museum.parts`.
"""

import importlib
import pkgutil

from labkit.testing.museum.exhibit import Exhibit

__all__ = ["Exhibit", "exhibits"]


def exhibits() -> tuple[Exhibit, ...]:
    """Every exhibit, sorted by name: each module of this package that has a label, `EXHIBIT`."""
    modules = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    labels = [module.EXHIBIT for module in modules if hasattr(module, "EXHIBIT")]
    return tuple(sorted(labels, key=lambda exhibit: exhibit.name))
