"""The rules: one file per family, pure functions from a merged run to findings.

A rule states in its docstring the condition under which the pattern it looks for is *right*, and
returns nothing then. Rules only read; they may run while the ranks are still stuck.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ddp_doctor.explain.equation import Equation
from ddp_doctor.explain.findings import CATALOG, ORDER, Finding
from ddp_doctor.explain.rules import (
    cost,
    data,
    groups,
    hangs,
    loss,
    micro_batches,
    pairs,
    replicas,
    synchronization,
    wrapper,
)
from ddp_doctor.facts.merged import Run

Rule = Callable[[Run, Equation], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    *hangs.RULES,
    *wrapper.RULES,
    *loss.RULES,
    *pairs.RULES,
    *micro_batches.RULES,
    *synchronization.RULES,
    *groups.RULES,
    *replicas.RULES,
    *data.RULES,
    *cost.RULES,
)


def examine(run: Run, equation: Equation) -> list[Finding]:
    """All findings, errors first; of several with one code, the first. A rule that fails is in
    `run.unchecked`."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        try:
            for finding in rule(run, equation):
                found.setdefault(finding.code, finding)
        except Exception as error:
            text = f"the rule {rule.__name__} failed ({type(error).__name__}: {error})"
            run.unchecked.append(text)
    return sorted(found.values(), key=lambda finding: ORDER[finding.severity])


def explanation_of(code: str) -> str:
    """What a finding means and when the pattern is right: its rule's own text.

    Raises KeyError if there is no such code.
    """
    severity, title, page = CATALOG[code]
    rule = next(rule for rule in RULES if _raises(rule, code, set()))
    return f"{severity} [{code}] {title}\n\n{inspect.getdoc(rule)}\n\nread {page}"


def _raises(function: Any, code: str, seen: set[str]) -> bool:
    """Whether a rule, or a function of its file that it calls, names the code."""
    seen.add(function.__name__)
    if f'"{code}"' in inspect.getsource(function):
        return True
    called = [function.__globals__.get(name) for name in function.__code__.co_names]
    return any(
        _raises(one, code, seen)
        for one in called
        if inspect.isfunction(one) and one.__module__ == function.__module__
        if one.__name__ not in seen
    )
