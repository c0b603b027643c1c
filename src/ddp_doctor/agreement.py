"""A certificate decides: findings and an equation that contradict what it measured are left out."""

from ddp_doctor.certified import Certificate
from ddp_doctor.equation import Equation, near
from ddp_doctor.findings import Finding

TOO_SMALL = {"missing_world_size_factor"}
TOO_LARGE = {"own_reduction_sums"}
OTHER_SCALE = {"scaled_by_world_size"}
OTHER_DIRECTION = {
    *("unequal_denominators", "local_negatives", "gather_without_gradient"),
    *("wrapper_bypassed", "wrapper_lost", "two_backwards"),
    *("model_changed_after_wrapping", "last_micro_batch_unsynced"),
}


def agreeing(
    certificate: Certificate, equation: Equation, findings: list[Finding]
) -> tuple[Equation, list[Finding]]:
    """The equation and the findings that agree with a certificate.

    The scale is measured with copies of one batch, so it does not depend on the deal. The
    number of micro-batches is not measured.
    """
    judged = {one.name: one for one in certificate.properties if one.judged}
    whole = judged.get("P1")
    copies = judged.get("P3", whole if whole and whole.verdict == "scaled" else None)
    wrong = set()
    if copies is not None and copies.ratio is not None and copies.verdict != "different":
        too_small, too_large = copies.ratio < 0.99, copies.ratio > 1.01
        wrong |= set() if too_small else TOO_SMALL
        wrong |= set() if too_large else TOO_LARGE
        wrong |= set() if too_small or too_large else OTHER_SCALE
        k = certificate.micro_batches
        total = equation.step.total if equation.step is not None else copies.ratio
        if not any(near(total, copies.ratio * factor) for factor in (1, k, 1 / k)):
            equation = equation.saying(
                f"measured  the gradient is {copies.ratio:.4g} times that of one process"
            )
    if whole is not None and whole.verdict != "different":
        wrong |= OTHER_DIRECTION
    return equation, [finding for finding in findings if finding.code not in wrong]
