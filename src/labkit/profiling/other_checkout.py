"""Import a package from another checkout beside the one that is installed.

    before = import_from(Path("../before/src"), "miniddp", "miniddp_before")
    before.MiniDDP(module)

Both versions can then take turns in the same processes, which is the only way to compare their
times (`labkit.profiling.benchmark`). The other version is loaded under a name of its own; its
imports of the package are rewritten to that name, those inside functions included.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType


def import_from(src: Path, package: str, alias: str) -> ModuleType:
    """Import `package` from the folder `src` as `alias`, a name that nothing else may have.

    Raises FileNotFoundError if `src` does not hold the package, and ValueError if `alias` already
    names a module from another place.
    """
    folder = (src / package).resolve()
    if not (folder / "__init__.py").is_file():
        raise FileNotFoundError(f"{src} has no package {package}: name a checkout's src folder")
    if (loaded := sys.modules.get(alias)) is not None:
        if Path(str(loaded.__file__)).parent != folder:
            raise ValueError(f"{alias} is already imported, from {loaded.__file__}")
        return loaded
    sys.meta_path.insert(0, _Finder(folder, package, alias))
    return importlib.import_module(alias)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `alias` and its submodules below `folder`."""

    def __init__(self, folder: Path, package: str, alias: str) -> None:
        self.folder, self.package, self.alias = folder, package, alias

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        first, *rest = fullname.split(".")
        if first != self.alias:
            return None
        place = self.folder.joinpath(*rest)
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not file.is_file():
            return None
        loader = _Loader(fullname, str(file))
        loader.package, loader.alias = self.package, self.alias
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with its imports of `package` rewritten to `alias`; caches no bytecode."""

    package: str
    alias: str

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                node.module = self._renamed(node.module or "")
            elif isinstance(node, ast.Import):
                for one in node.names:
                    one.name = self._renamed(one.name)
        return compile(tree, self.path, "exec", dont_inherit=True)

    def _renamed(self, name: str) -> str:
        first, dot, rest = name.partition(".")
        return f"{self.alias}{dot}{rest}" if first == self.package else name
