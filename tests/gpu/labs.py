"""The threads' labs under torchrun, on GPUs: their own checks, and the text that a CPU prints."""

import os
from collections.abc import Iterator
from unittest import mock

from labkit.launch.scripts import ScriptError, run_script

from .machine import Machine
from .proofs import Evidence

LABS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("accumulate_vs_ddp", (), 4),
    ("mean_of_means", (), 2),
    ("sum_or_average", (), 2),
    ("bypassed_wrapper", (), 2),
    ("bypassed_wrapper", ("--fix", "prepared"), 2),
    ("two_nodes", (), 2),
    ("buckets_that_overlap", (), 2),
)
"""Script, arguments, ranks. Their exit codes are their own verdicts."""


def printed(lab: str, arguments: tuple[str, ...], ranks: int, device: str) -> str:
    """What the lab prints on that kind of device. Raises ScriptError if it finds a fault."""
    # Forked ranks would share a process that has asked for GPUs; fresh ones start on their own.
    with mock.patch.dict(os.environ, LABKIT_DEVICE=device):
        return run_script(f"labs/{lab}.py", *arguments, ranks=ranks, fresh=device == "cuda")


def find(machine: Machine) -> Iterator[Evidence]:
    for lab, arguments, ranks in LABS if machine.kind == "cuda" else LABS[3:4]:
        what = " ".join((f"labs/{lab}.py", *arguments))
        own = len(machine.gpus) >= ranks
        shared = f"{ranks} ranks, {'NCCL' if own else 'gloo, GPUs shared'}"
        on = shared if machine.kind == "cuda" else f"{ranks} ranks, CPU, gloo"
        try:
            ours = printed(lab, arguments, ranks, machine.kind)
        except ScriptError as error:
            yield Evidence(what, on, False, str(error).splitlines()[-1][:120])
            continue
        same = ours == printed(lab, arguments, ranks, "cpu")
        text = (
            "the same text as on the CPU" if same else "other text than on the CPU (times, digits)"
        )
        yield Evidence(what, on, True, f"exit code 0, {text}")
