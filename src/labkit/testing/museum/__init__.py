"""The museum: known broken data-parallel implementations, one per file, each wrong in one way.

    for exhibit in exhibits():
        print(exhibit.name, exhibit.bug, exhibit.caught_by)

Each exhibit is short, looks harmless, and trains with a falling loss curve. They are common
mistakes, written for this museum; none is anybody's code. Use them to learn what a mistake looks
like, and to try your own tests: a test that passes on an exhibit has a gap.

`labkit.testing.museum.parts` holds what the exhibits do right.
"""

import importlib
import pkgutil

from labkit.testing.museum.exhibit import Exhibit

__all__ = ["Exhibit", "exhibits"]


def exhibits() -> tuple[Exhibit, ...]:
    """Every exhibit, sorted by name: each module of this package with a label, `EXHIBIT`."""
    modules = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    labels = [module.EXHIBIT for module in modules if hasattr(module, "EXHIBIT")]
    return tuple(sorted(labels, key=lambda exhibit: exhibit.name))
