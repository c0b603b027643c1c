"""The rules: one file per family, pure functions from a merged run to findings.

A rule states in its docstring the condition under which the pattern it looks for is *right*, and
returns nothing then. Rules only read; they may run while the ranks are still stuck.
"""

from collections.abc import Callable, Iterable

from ddp_doctor.equation import Equation
from ddp_doctor.findings import ORDER, Finding
from ddp_doctor.merged import Run
from ddp_doctor.rules import cost, data, hangs, loss, replicas, synchronization, wrapper

Rule = Callable[[Run, Equation], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    *hangs.RULES,
    *wrapper.RULES,
    *loss.RULES,
    *synchronization.RULES,
    *replicas.RULES,
    *data.RULES,
    *cost.RULES,
)


def examine(run: Run, equation: Equation) -> list[Finding]:
    """All findings, errors first; of several with one code, the first. Rules that fail say so."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        try:
            for finding in rule(run, equation):
                found.setdefault(finding.code, finding)
        except Exception as error:
            run.notes.append(f"The rule {rule.__name__} failed: {type(error).__name__}: {error}")
    return sorted(found.values(), key=lambda finding: ORDER[finding.severity])
