"""The doctor: what one optimizer step of your own training run computes, and what is wrong with it.

    torchrun --nproc-per-node 4 -m ddp_doctor train.py --lr 0.1
    python -m ddp_doctor --certify train.py     # measure its gradient against one process's
    python -m ddp_doctor compare "COMMAND" "COMMAND"  # what their optimizers get
    python -m ddp_doctor train.py          # a script that starts its own ranks, or one process
    import ddp_doctor; ddp_doctor.watch()  # one line at the top of a script
    from ddp_doctor.testing import assert_certified  # in a test

A fact goes through the rooms from the top to the bottom:

================  =================================================================================
`run`             starts everything below: the command's life, in each process and beside them
`observe`         one file per thing observed, in the user's process; writes facts
`facts`           what a process writes down, to a folder and never through a process group, and
                  the journals of all ranks, side by side; what a certificate says
`explain`         what one optimizer step computes, and the rules: from facts to findings
`certificate`     `certify`: a script's ranks against one process of the same script, measured
`functions`       the same for a step that the user gives as functions; replaces nothing in torch
`compare`         two commands from the same weights: what their optimizers get
`report`          the terminal, and two files: text and JSON
================  =================================================================================

How a fact gets from a step into a report:

1. `run.start` makes a `Session`; `observe.install` patches torch; the leader starts the watcher.
2. An observer builds a typed fact. It writes the fact at once, or adds it to the recorder's window,
   which the hook after an optimizer's step writes as one `WindowFact`.
3. `Session.write` appends it as a JSON line to this process's journal.
4. When all ranks have ended or look stuck, the watcher reads all journals, and `Run.of` puts the
   ranks side by side.
5. `steps_of` measures how each step combined the ranks, `observed` says what was measured,
   `examine` runs the rules, `with_answers` has a certificate answer hints, and the report prints.

The certificate compares files of its own (`certificate.files`); so do `functions` and `compare`.
Only the certificate's last start, which says why gradients are not equal, goes this way.

`__main__` is the command line, `options` what can be set on it, and `testing` a certificate in a
test.

Importing this package imports neither torch nor anything of the user's: the watcher has to start
in a tenth of a second.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_doctor.certificate.apart import certify
    from ddp_doctor.certificate.marks import batch
    from ddp_doctor.run.start import watch

__all__ = ["batch", "certify", "watch"]

__version__ = "0.1.0"

_HOMES = {
    "batch": "certificate.marks",
    "certify": "certificate.apart",
    "watch": "run.start",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddp_doctor' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ddp_doctor.{_HOMES[name]}"), name)
