"""The doctor: what one optimizer step of your own training run computes, and what is wrong with it.

    torchrun --nproc-per-node 4 -m ddp_doctor train.py --lr 0.1
    python -m ddp_doctor --certify train.py     # measure its gradient against one process's
    python -m ddp_doctor train.py          # a script that starts its own ranks, or one process
    import ddp_doctor; ddp_doctor.watch()  # one line at the top of a script

In reading order (smaller files serve these):

================  =================================================================================
`__main__`        the command line
`starting`        starts everything below: `start`, and `watch` for a script or a notebook
`session`         the doctor in one process: what is observed and written down, and how it ends
`observe`         one file per thing observed
`journal`         what a process writes down: bounded, to a folder, never through a process group
`calls`           the functions of torch.distributed in which ranks wait for each other
`watcher`         a process of its own: waits for the ranks, merges, reports
`merged`          the journals of all ranks, side by side
`equation`        what one optimizer step computes: factors, counts, the weight of each item
`rules`           one file per family: a pure function from merged journals to findings
`findings`        every finding's name, severity, title, and page
`certificate`     `certify`: a script's ranks against one process of the same script, measured
`certified`       what a certificate says; in `agreement`, it overrules equation and findings
`report`          the terminal, JSON, and a page
================  =================================================================================

Importing this package imports neither torch nor anything of the user's: the watcher has to start
in a tenth of a second.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_doctor.certificate.marks import batch
    from ddp_doctor.certificate.program import certify
    from ddp_doctor.starting import watch

__all__ = ["batch", "certify", "watch"]

_HOMES = {
    "batch": "certificate.marks",
    "certify": "certificate.program",
    "watch": "starting",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddp_doctor' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ddp_doctor.{_HOMES[name]}"), name)
