"""A certificate decides: findings and an equation that contradict what it measured are left out."""

from dataclasses import replace

from ddp_doctor.explain.equation import Equation
from ddp_doctor.explain.findings import ORDER, Finding
from ddp_doctor.explain.numbers import near
from ddp_doctor.facts.certificate import Certificate, Property

TOO_SMALL = {"missing_world_size_factor"}
TOO_LARGE = {"own_reduction_sums"}
OTHER_SCALE = {"scaled_by_world_size"}
# What a measured step that is equal refutes. A model that changes after it was wrapped is missing
# here: it may do so after the measured steps.
OF_ONE_STEP = {
    *("unequal_denominators_accumulation", "loss_reduced_before_backward", "clipped_before_sync"),
    *("manual_all_reduce_skips_none", "optimizer_in_backward", "parameters_averaged"),
    *("replicas_differ_at_start", "static_graph_with_no_sync", "other_than_average"),
}
OTHER_DIRECTION = {
    *("unequal_denominators", "local_negatives"),
    *("wrapper_bypassed", "wrapper_lost", "two_backwards", "last_micro_batch_unsynced"),
}


def agreeing(
    certificate: Certificate, equation: Equation, findings: list[Finding]
) -> tuple[Equation, list[Finding]]:
    """The equation and the findings that agree with a certificate."""
    copies = _scale(certificate)
    if copies is not None and copies.ratio is not None:
        k = certificate.micro_batches
        total = equation.step.total if equation.step is not None else copies.ratio
        # The number of micro-batches is not measured.
        if not any(near(total, copies.ratio * factor) for factor in (1, k, 1 / k)):
            samples = "with copies of one batch, " if copies.name == "P3" else ""
            equation = equation.saying(
                f"measured  {samples}the gradient is {copies.ratio:.4g} times that of one process"
            )
    wrong = contradicted(certificate)
    return equation, [one for one in findings if one.later or one.code not in wrong]


def contradicted(certificate: Certificate) -> set[str]:
    """The codes of findings that a certificate has measured to be wrong."""
    wrong: set[str] = set()
    copies = _scale(certificate)
    if copies is not None and copies.ratio is not None:
        too_small, too_large = copies.ratio < 0.99, copies.ratio > 1.01
        wrong |= set() if too_small else TOO_SMALL
        wrong |= set() if too_large else TOO_LARGE
        wrong |= set() if too_small or too_large else OTHER_SCALE
    whole = _judged(certificate).get("P1")
    if whole is not None and {whole.verdict, certificate.verdict} <= {"equal", "scaled"}:
        wrong |= OTHER_DIRECTION
        # A lost path through other ranks' features may leave the direction as it is.
        wrong |= {"gather_without_gradient"} if whole.verdict == "equal" else set()
    return wrong | (OF_ONE_STEP if certificate.verdict == "equal" else set())


SCALE = TOO_SMALL | TOO_LARGE | OTHER_SCALE | {"partial_window_divided_by_k"}
SCALE |= {"loss_not_divided_by_accumulation", "loss_divided_twice"}
DIRECTION = {
    *("unequal_denominators", "unequal_denominators_accumulation", "local_negatives"),
    *("gather_without_gradient", "loss_reduced_before_backward"),
}


def explaining(certificate: Certificate, findings: list[Finding]) -> list[Finding]:
    """The findings, where hints that explain what a certificate has measured are errors."""
    codes = {"scaled": SCALE | DIRECTION, "different": DIRECTION}.get(certificate.verdict, set())
    found = [
        replace(finding, severity="error") if finding.code in codes else finding
        for finding in findings
        if finding.severity == "hint"
    ]
    rest = [finding for finding in findings if finding.severity != "hint"]
    return sorted([*rest, *found], key=lambda finding: ORDER[finding.severity])


def _judged(certificate: Certificate) -> dict[str, Property]:
    return {one.name: one for one in certificate.properties if one.judged}


def _scale(certificate: Certificate) -> Property | None:
    """The property that measures the scale: copies of one batch, so the deal has no part in it.

    All samples if copies do not only scale; copies may if the loss grows with their number.
    """
    judged = _judged(certificate)
    whole, copies = judged.get("P1"), judged.get("P3")
    if whole is not None and whole.verdict in ("equal", "scaled"):
        return whole
    return whole if copies is None or copies.verdict == "different" else copies
