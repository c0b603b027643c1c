"""The rules: one file per family, pure functions of a merged run that return findings.

A rule states in its docstring the condition under which the pattern it looks for is *right*, and
returns nothing then. Rules only read; they may run while the ranks are still stuck. Importing a
family registers its rules.
"""

import inspect

from ddp_doctor.explain.findings import CATALOG, ORDER, RULES, Finding
from ddp_doctor.explain.rules import combining, data, hangs, loss, pairs, replicas, updates  # noqa: F401
from ddp_doctor.explain.steps import Step
from ddp_doctor.facts.merged import Run


def examine(run: Run, steps: list[Step]) -> list[Finding]:
    """All findings, errors first; of several with one code, the first. A rule that fails is in
    `run.unchecked`."""
    found: dict[str, Finding] = {}
    for rule in dict.fromkeys(RULES.values()):
        try:
            for finding in rule(run, steps):
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
    return f"{severity} [{code}] {title}\n\n{inspect.getdoc(RULES[code])}\n\nread {page}"
