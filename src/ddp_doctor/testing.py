"""For the tests of a training program: fail unless its ranks compute the gradient of one process.

    from ddp_doctor.testing import assert_certified

    def test_two_ranks_compute_the_gradient_of_one_process():
        assert_certified("train.py", "--batch-size", "8", ranks=2)

    def test_my_step_computes_the_gradient_of_one_process():
        assert_certified(make_model=make_model, backward=backward, batches=batches)

Any test runner will do. The test's own process may have loaded anything: the ranks do not start
from it.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_doctor.certificate.program import certify_apart

if TYPE_CHECKING:
    from ddp_doctor.functions.verdict import Constant


class NotJudgedError(AssertionError):
    """Nothing was shown: the text says why, and what to change."""


def assert_certified(
    script: str | Path | None = None,
    *arguments: str,
    make_model: Callable[[], Any] | None = None,
    backward: Callable[[Any, Any], Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    batches: Callable[[int, int], Iterable[Any]] | None = None,
    join: Callable[[list[Any]], Any] | None = None,
    deal: Callable[[list[Any]], list[Any]] | None = None,
    constant: "Constant | None" = None,
    tolerance: float = 1e-3,
    limit: float = 60.0,
    ranks: int = 2,
    cpu: bool = False,
) -> None:
    """Raise AssertionError unless `ranks` processes compute the gradient of one process.

    Give a script with its arguments, or functions that are defined at the top level of a file:

    - `make_model()` returns the module that is trained, with its wrapper. It runs in every rank, in
      a process group over gloo, after `torch.manual_seed(0)`.
    - `backward(model, batch)` back-propagates one optimizer step with all that belongs to it:
      micro-batches, `no_sync`, an average by hand. It must not change the weights. Or, shorter:
      `loss(model, batch)` returns what is back-propagated; DDP wraps a module without a wrapper.
      Collectives are allowed: in one process, they see one rank.
    - `batches(rank, world_size)` returns an iterable; its first item is the rank's whole step: all
      its micro-batches, which `backward` cuts.
    - `join(batches)` makes one batch of those of all ranks, and `deal(batches)` as many batches
      with the same samples in another order, each as long as before. By default, a batch is a
      tensor, or a tuple, list, or dict of tensors, with one sample per row, padded to one length on
      all ranks.

    `constant`: by what a loss that is a sum is divided: the number of samples of one "rank", or of
    "all"; "all" also if nothing divides it. Without it, the factor of such a loss is not judged.
    `tolerance`: relative; half precision needs more. `limit`: seconds that a rank waits for others.
    `cpu`: run a script that was written for GPUs on CPU ranks.

    The text of the AssertionError is the certificate. If it is not judged, the error is a
    NotJudgedError. Raises ValueError for less than two ranks or a function that cannot be imported,
    FileNotFoundError without such a script, TypeError for another set of arguments, and
    RuntimeError if the doctor fails. Cost: of functions, `ranks` + 2 forks; the first call also
    starts an interpreter. Of a script, an interpreter and up to six starts.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    steps = {"make_model": make_model, "backward or loss": backward or loss, "batches": batches}
    missing = [name for name, function in steps.items() if function is None]
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}: one rank has nothing to average; pass 2 or more.")
    if constant not in (None, "rank", "all"):
        raise ValueError(f"constant is {constant!r}: pass 'rank', 'all', or None.")
    if (script is None) == bool(missing) or (script and len(missing) < 3) or (backward and loss):
        said = f"; {', '.join(missing)} missing" if len(missing) < 3 and script is None else ""
        raise TypeError(f"pass a script, or make_model, backward or loss, and batches{said}.")
    if script is None:
        given = {"make_model": make_model, "batches": batches, "join": join, "deal": deal}
        try:
            verdict, text = _of_functions(given, backward, loss, tolerance, limit, ranks, constant)
        except (ValueError, RuntimeError) as error:
            raise error.with_traceback(None) from None
    elif Path(script).is_file():
        certificate, report = certify_apart([str(script), *arguments], ranks, cpu, explain=True)
        verdict, text = certificate.verdict, f"{certificate.as_text(80)}\n{report}"
    else:
        raise FileNotFoundError(f"there is no script {str(script)!r} here ({Path.cwd()}).")
    if verdict != "equal":
        raise (NotJudgedError if verdict == "not judged" else AssertionError)(f"\n{text}")


def _of_functions(
    given: dict[str, Any],
    backward: Callable[[Any, Any], Any] | None,
    loss: Callable[[Any, Any], Any] | None,
    tolerance: float,
    limit: float,
    ranks: int,
    constant: "Constant | None",
) -> tuple[str, str]:
    from ddp_doctor.functions.gradients import Backward, Functions
    from ddp_doctor.functions.processes import measured
    from ddp_doctor.functions.verdict import conclude

    given = {name: function for name, function in given.items() if function is not None}
    given["backward"] = Backward(loss) if loss else backward
    functions = Functions(wrap=loss is not None, tolerance=tolerance, **given)
    certificate = conclude(measured(functions, ranks, limit), ranks, constant)
    return certificate.verdict, str(certificate)
