"""A report as JUnit XML, for services that show the results of tests."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from ddp_doctor.explain.findings import Finding
from ddp_doctor.facts.certificate import TITLES, Certificate
from ddp_doctor.options import LEVELS

REFUSED = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # by XML 1.0


class Case(NamedTuple):
    """One test case. `kind`: failure, error (not checked), skipped, or empty if it passed."""

    name: str
    kind: str
    said: str


def as_junit(
    certificate: Certificate | None,
    findings: Sequence[Finding],
    unchecked: Sequence[str],
    fail_on: str | None,
) -> str:
    """A case per property and finding. Any fails exactly if --fail-on makes the exit code 3 or 4.

    `unchecked` matters without a certificate. `fail_on` None means "error".
    """
    if certificate is not None:
        cases = [*_measured(certificate)]
    else:
        kind = "error" if unchecked else ""
        cases = [Case("everything was checked", kind, "; ".join(unchecked))]
    for finding in findings:
        kind = "failure" if finding.severity in LEVELS[fail_on or "error"] else ""
        cases.append(Case(f"{finding.code}: {finding.title}", kind, _text(finding)))
    of_kind = Counter(case.kind for case in cases)
    counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    numbers = {name: str(of_kind[kind]) for name, kind in counts.items()}
    numbers |= {"name": "ddp_doctor", "tests": str(len(cases))}
    suite = ElementTree.Element("testsuite", numbers)
    for case in cases:
        element = ElementTree.SubElement(
            suite, "testcase", classname="ddp_doctor", name=REFUSED.sub("�", case.name)
        )
        said = REFUSED.sub("�", case.said)
        if case.kind:
            first = said.partition("\n")[0]
            ElementTree.SubElement(element, case.kind, message=first).text = said
        elif said:
            ElementTree.SubElement(element, "system-out").text = said
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _measured(certificate: Certificate) -> Iterator[Case]:
    """The verdict and the properties. One that is not equal by design does not fail."""
    kinds = {"equal": "", "not judged": "error"}
    said = "" if certificate.verdict == "equal" else f"{certificate.verdict}: {certificate.why}"
    yield Case("certificate", kinds.get(certificate.verdict, "failure"), said)
    for one in certificate.properties:
        fails = one.judged and certificate.verdict not in kinds
        kind = "" if one.verdict == "equal" else "failure" if fails else "skipped"
        numbers = "" if one.ratio is None else f" (ratio {one.ratio:.4f}, cosine {one.cosine:.4f})"
        said = f"{one.verdict}{numbers}: {one.why}" if kind else ""
        yield Case(f"{one.name}: {TITLES[one.name]}", kind, said)


def _text(finding: Finding) -> str:
    where = f"\nwhere: {finding.where}" if finding.where else ""
    return f"{finding.severity}: {finding.evidence}{where}\nfix: {finding.fix}"
