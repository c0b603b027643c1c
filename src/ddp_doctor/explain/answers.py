"""What a certificate says of each hint: measured, contradicted, or outside of what it measures."""

from dataclasses import replace

from ddp_doctor.explain.findings import ORDER, Finding, Prediction
from ddp_doctor.explain.numbers import near
from ddp_doctor.facts.certificate import Certificate, Property

TOLERANCE = 0.01  # of a ratio
OF_A_SHARE = 0.02


def with_answers(certificate: Certificate, findings: list[Finding]) -> list[Finding]:
    """The findings, errors first. A hint that a certificate has measured is an error; one that it
    contradicts, a note. Findings without a prediction are measured facts, and stay.
    """
    found = [_answered(certificate, one, one.predicts) if one.predicts else one for one in findings]
    return sorted(found, key=lambda one: ORDER[one.severity])


def _answered(certificate: Certificate, hint: Finding, predicts: Prediction) -> Finding:
    if predicts.outside:
        return replace(hint, answer=f"outside of what --certify measures: {predicts.outside}")
    if predicts.shares:
        return _of_shares(certificate, hint, predicts)
    if predicts.ratio is None:
        return _of_any_difference(certificate, hint, predicts)
    return _of_a_ratio(certificate, hint, predicts, predicts.ratio)


def _of_a_ratio(
    certificate: Certificate, hint: Finding, predicts: Prediction, ratio: float
) -> Finding:
    """All samples measure a factor, or, if their direction differs, copies of one batch."""
    if certificate.loss_is_a == "sum":
        p1 = next((one for one in certificate.properties if one.name == "P1"), None)
        if not predicts.undivided or p1 is None or p1.ratio is None:
            return _undecided(hint, "the loss is a sum, and what divides it decides")
        shown = f"P1 has the ratio {p1.ratio:.4f}, and nothing divides the loss"
        return _decided(hint, predicts, near(p1.ratio, ratio, TOLERANCE), shown)
    found = [one for name in ("P1", "P3") if (one := _judged(certificate, name))]
    scale = next((one for one in found if one.verdict in ("equal", "scaled")), None)
    if scale is None or scale.ratio is None:
        return _undecided(hint, "no factor was measured")
    return _decided(hint, predicts, near(scale.ratio, ratio, TOLERANCE), _numbers(scale))


def _of_shares(certificate: Certificate, hint: Finding, predicts: Prediction) -> Finding:
    """One process weighs the ranks' samples by their counts, where their average does not."""
    p1, shares = _judged(certificate, "P1"), certificate.shares
    if p1 is None or (shares is None and p1.verdict == "different"):
        return _undecided(hint, "the ranks' shares of the gradient were not measured")
    if shares is None:
        return _decided(hint, predicts, False, _numbers(p1))
    shown = f"one process weighs the ranks by {', '.join(f'{one:.3f}' for one in shares)}"
    pairs = zip(shares, predicts.shares, strict=False)
    same = len(shares) == len(predicts.shares) and all(abs(a - b) <= OF_A_SHARE for a, b in pairs)
    return _decided(hint, predicts, same, shown)


def _of_any_difference(certificate: Certificate, hint: Finding, predicts: Prediction) -> Finding:
    p1 = _judged(certificate, "P1")
    if p1 is None:
        return _undecided(hint, "P1 was not measured")
    return _decided(hint, predicts, p1.verdict != "equal", _numbers(p1))


def _decided(hint: Finding, predicts: Prediction, is_measured: bool, what: str) -> Finding:
    if is_measured:
        answer = f"measured: {what}, as predicted ({predicts.said})"
        return replace(hint, severity="error", answer=answer)
    answer = f"contradicted: predicted was {predicts.said}, but {what}"
    return replace(hint, severity="note", answer=answer)


def _undecided(hint: Finding, why: str) -> Finding:
    return replace(hint, answer=f"not decided: {why}")


def _numbers(one: Property) -> str:
    numbers = "" if one.ratio is None else f", with ratio {one.ratio:.4f}"
    numbers += "" if one.cosine is None else f" and cosine {one.cosine:.4f}"
    return f"{one.name} is {one.verdict}{numbers}"


def _judged(certificate: Certificate, name: str) -> Property | None:
    return next((one for one in certificate.properties if one.name == name and one.judged), None)
