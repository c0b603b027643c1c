"""The report as JUnit XML: a case fails exactly where --fail-on would."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from doctor.journals import run_of, step

from ddp_doctor.certificate.program import exit_code
from ddp_doctor.explain.findings import Finding, finding
from ddp_doctor.explain.observed import observed
from ddp_doctor.facts.certificate import Certificate, Property
from ddp_doctor.options import Options
from ddp_doctor.report.junit import as_junit
from ddp_doctor.report.report import Report, write_report

ERROR = finding("replicas_drift", "2 parameters differ.", "train.py:3", "Average.")
WARNING = finding("epoch_order_repeats", "\x1b[31mred", "", "Shuffle.")
HINT = finding("loss_not_divided_by_accumulation", "Twice.", "train.py:4", "Once.")


def report_of(*findings: Finding, certificate: Certificate | None = None) -> Report:
    run = run_of(step())
    return Report(run, observed(run, []), list(findings), certificate)


def kinds(report: Report, fail_on: str | None = None) -> dict[str, str]:
    """What became of each case; empty if it passed."""
    unchecked = report.verdict()["unchecked"]
    text = as_junit(report.certificate, report.findings, unchecked, fail_on)
    suite = ElementTree.fromstring(text)
    found = {
        case.attrib["name"].partition(":")[0]: next(
            (one.tag for one in case if one.tag != "system-out"), ""
        )
        for case in suite
    }
    assert suite.attrib["tests"] == str(len(found))
    assert suite.attrib["failures"] == str(list(found.values()).count("failure"))
    return found


@pytest.mark.parametrize(
    ("fail_on", "warning"), [(None, ""), ("error", ""), ("warning", "failure")]
)
def test_a_finding_fails_from_the_level_of_fail_on(fail_on: str | None, warning: str) -> None:
    assert kinds(report_of(ERROR, WARNING, HINT), fail_on) == {
        "everything was checked": "",
        "replicas_drift": "failure",
        "epoch_order_repeats": warning,
        "loss_not_divided_by_accumulation": "",
    }


def test_a_run_of_which_nothing_was_seen_is_an_error() -> None:
    nothing = run_of([])
    assert kinds(Report(nothing, observed(nothing, []), [])) == {"everything was checked": "error"}


@pytest.mark.parametrize("verdict", ["equal", "scaled", "different", "not judged"])
@pytest.mark.parametrize("p2", ["equal", "different", "not judged"])
@pytest.mark.parametrize("findings", [[], [ERROR], [WARNING], [HINT]])
def test_a_certificate_fails_exactly_if_the_exit_code_does(
    verdict: str, p2: str, findings: list[Finding]
) -> None:
    properties = [Property("P1", verdict, "P1", 1.0, 1.0), Property("P2", p2, "P2")]
    certificate = Certificate(verdict, "why", properties=properties)
    report = report_of(*findings, certificate=certificate)
    found = kinds(report, "error")
    assert {"certificate", "P1", "P2"} <= found.keys()
    fails = bool({"failure", "error"} & set(found.values()))
    assert fails == bool(exit_code(certificate, report.worst, "error"))


def test_the_file_is_written_beside_the_page(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    write_report(report_of(ERROR), Options(junit=str(path)), tmp_path, silent=True)
    (case,) = ElementTree.parse(path).findall("testcase[failure]")
    assert case[0].attrib["message"] == "error: 2 parameters differ."
    assert "fix: Average." in (case[0].text or "")
