"""Run the user's script in this process, as the interpreter would."""

import builtins
import sys
import types
from pathlib import Path

LAUNCHERS = ("torchrun", "accelerate", "python", "python3")  # all of them take -m for a module


def no_script(script: str, arguments: list[str]) -> str:
    """The error if `script` does not exist; if it is a launcher, with the corrected command."""
    said = f"there is no script {script!r} here ({Path.cwd()})."
    scripts = [at for at, argument in enumerate(arguments) if argument.endswith(".py")]
    if Path(script).name in LAUNCHERS and scripts:
        before, after = arguments[: scripts[0]], arguments[scripts[0] :]
        right = " ".join([script, *before, "-m ddp_doctor", *after])
        said += f" Put the launcher first:\n    {right}"
    return said


def run_script(script: str) -> None:
    """Execute the script as `python script` would: it is `__main__`, also for pickled functions."""
    path = Path(script).absolute()
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=str(path), __builtins__=builtins, __spec__=None, __package__=None
    )
    sys.modules["__main__"] = module
    sys.path[0] = str(path.resolve().parent)
    code = compile(path.read_bytes(), str(path), "exec")
    exec(code, module.__dict__)
