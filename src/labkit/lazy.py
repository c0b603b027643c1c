"""Names that a package offers at its top and imports on first use.

`from labkit.launch import run_ranks` loads torch; `import labkit.launch.guard` does not. Each
package's `__init__` lists its everyday names once, by submodule.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def offer(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` and `__all__` of `package`; `names` maps each submodule to its names.

    A module of another package is named in full.
    """
    home = {
        name: module if "." in module else f"{package}.{module}"
        for module, offered in names.items()
        for name in offered
    }

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return get, sorted(home)
