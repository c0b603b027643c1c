"""Numbers that rounding has changed, and how they are written."""

import math

TOLERANCE = 0.01  # bfloat16 rounds a factor by up to 0.4 %


def near(value: float, wanted: float, tolerance: float = TOLERANCE) -> bool:
    """Whether two positive numbers agree up to rounding."""
    return math.isfinite(value) and abs(value - wanted) <= tolerance * abs(wanted)


def alike(values: list[float], tolerance: float = TOLERANCE) -> bool:
    """Whether all numbers agree up to rounding."""
    return not values or max(values) - min(values) <= tolerance * max(
        abs(value) for value in values
    )


def number(value: float) -> str:
    """A number as people write it: 4, 0.25, 1.67, nan."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}"
