"""For the tests of a training program: fail unless its ranks compute the gradient of one process.

    from ddp_doctor.testing import assert_certified

    def test_two_ranks_compute_the_gradient_of_one_process():
        assert_certified("train.py", "--batch-size", "8", ranks=2)

Any test runner will do. The test's own process may have loaded anything: the ranks do not start
from it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_doctor.certificate.apart import certify_apart


class NotJudgedError(AssertionError):
    """Nothing was shown: the text says why, and what to change."""


def assert_certified(
    script: str | Path | None = None,
    *arguments: str,
    make_model: Callable[[], Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    batches: Callable[[int, int], Any] | None = None,
    ranks: int = 2,
    cpu: bool = False,
) -> None:
    """Raise AssertionError unless `ranks` processes compute the gradient of one process.

    Give a script with its arguments, or three functions that can be imported:

    - `make_model()` returns a module. The helper wraps it with DDP, unless it is wrapped.
    - `loss(model, batch)` calls the model, and returns what the rank back-propagates, a scalar.
    - `batches(rank, world_size)` returns a DataLoader, or an iterable of batches. Such a batch is a
      tensor, or a tuple, list, or dict of tensors with one sample per row. A batch is a step.

    `cpu`: run a script that was written for GPUs on CPU ranks. The functions run under gloo, and
    `loss` may communicate.

    The text of the AssertionError is the certificate and, if the ranks are not equal, the report of
    the rules, for which the script starts once more. If the certificate is not judged, the error is
    a NotJudgedError. Raises ValueError for less than two ranks or a function that cannot be
    imported, FileNotFoundError without such a script, TypeError for another set of arguments, and
    RuntimeError if the doctor fails. Cost: one new interpreter and `ranks` + 1 forks of it; where
    the system is not Linux, `ranks` + 2 interpreters.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    functions = {"make_model": make_model, "loss": loss, "batches": batches}
    command = _command(script, arguments, functions)
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}: one rank has nothing to average; pass 2 or more.")
    certificate, report = certify_apart(command, ranks, cpu, explain=True)
    if certificate.verdict != "equal":
        kind = NotJudgedError if certificate.verdict == "not judged" else AssertionError
        raise kind(f"\n{certificate.as_text(80)}\n{report}")


def _command(
    script: str | Path | None, arguments: tuple[str, ...], functions: dict[str, Any]
) -> list[str]:
    given = {name: function for name, function in functions.items() if function is not None}
    missing = functions.keys() - given.keys()
    if script is not None and not given:
        if not Path(script).is_file():
            raise FileNotFoundError(f"there is no script {str(script)!r} here ({Path.cwd()}).")
        return [str(script), *arguments]
    if script is not None or missing:
        said = f"; {', '.join(sorted(missing))} missing" if given and script is None else ""
        raise TypeError(f"pass a script, or make_model, loss, and batches{said}.")
    listed = [_named(name, function) for name, function in given.items()]
    task = json.dumps({"path": sys.path, "functions": listed})
    return ["-m", "ddp_doctor.certificate.functions", task]


def _named(role: str, function: Any) -> tuple[str, str, str]:
    """Module, its file, and the name there."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name, file = getattr(function, "__qualname__", ""), getattr(module, "__file__", None)
    there: Any = module
    for part in name.split("."):
        there = getattr(there, part, None)
    if module is None or file is None or there is not function:
        raise ValueError(
            f"{role} is {function!r}, which the ranks cannot import by its name. Define it at the "
            "top level of a file."
        )
    return module.__name__, str(Path(file).absolute()), name
