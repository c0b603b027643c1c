"""Run the user's script in this process, as the interpreter would."""

import builtins
import importlib.util
import sys
import traceback
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

LAUNCHERS = ("torchrun", "accelerate", "python", "python3")  # all of them take -m for a module


class NotRunnableError(Exception):
    """There is no program to run; the text says why, and what to do."""


def problem_with(script: str, arguments: list[str]) -> str:
    """What to say if there is no such script; with the right command if it is a launcher."""
    if script == "-m":
        name = arguments[0] if arguments else ""
        if name.endswith(".py") and Path(name).is_file():
            return f"{name} is a file, and -m takes the name of a module: leave out -m."
        # To look for a module inside a package would import the package, too early.
        there = name and importlib.util.find_spec(name.partition(".")[0])
        return "" if there else f"there is no module {name!r} on the path."
    if Path(script).is_file():
        return ""
    said = f"there is no script {script!r} here ({Path.cwd()})."
    scripts = [at for at, argument in enumerate(arguments) if argument.endswith(".py")]
    if Path(script).name in LAUNCHERS and scripts:
        before, after = arguments[: scripts[0]], arguments[scripts[0] :]
        right = " ".join([script, *before, "-m ddp_doctor", *after])
        said += f" Put the launcher first:\n    {right}"
    return said


def run_script(script: str, arguments: list[str]) -> None:
    """Execute the script as `python script arguments` would; `-m` is a script, too.

    It is `__main__`, also for pickled functions. Raises NotRunnableError.
    """
    spec: ModuleSpec | None = None
    path = Path(script).absolute()
    if script == "-m":
        name, *arguments = arguments
        spec = _module(name)
        path = Path(str(spec.origin))
    else:
        sys.path[0] = str(path.resolve().parent)
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        raise NotRunnableError(f"{path} is no Python that can be run: {said}") from None
    sys.argv = [str(path) if spec else script, *arguments]
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=str(path),
        __builtins__=builtins,
        __spec__=spec,
        __package__=spec.parent if spec else None,
    )
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _module(name: str) -> ModuleSpec:
    """What -m runs: the module, or the `__main__` of a package."""
    spec, package = None, False
    try:
        spec = importlib.util.find_spec(name)
        package = spec is not None and spec.submodule_search_locations is not None
        spec = importlib.util.find_spec(f"{name}.__main__") if package else spec
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that contains it imports what is not there
    if spec is None or not spec.has_location:
        problem = f"there is no module {name!r} with a file to run."
        wanted = f"{name!r} is a package without a __main__.py: name a module of it after -m."
        raise NotRunnableError(wanted if package else problem)
    return spec
