"""What ranks returned, as text that nbval compares, and as an observation that a student reads.

Two right solutions may add numbers in another order, so their last digits differ. A printed number
is therefore rounded to a grid on which the key's own number is a point: a submission prints what
the key printed unless it differs by more than the tolerance.
"""

import hashlib
import math
from typing import Any

import numpy as np

_MOST_SHARED = 1000  # an array may take this many times its own largest magnitude from others
_MOST_TEXT = 100_000  # characters of a table; a digest stands for the rest
_LONGEST = 200  # characters of a string that is shown
AS_ASKED = "as asked"  # what on_rank returns in place of a complaint about communication
Results = list[Any]  # what each rank returned


def text_of(results: Results, key: Results | None, tolerance: float) -> str:
    """`results` as a table, one line per rank and value, rounded to the grid of `key`."""
    if key is not None and len(key) == len(results):
        results = [
            _rounded(own, wanted, tolerance) for own, wanted in zip(results, key, strict=True)
        ]
    lines = [f"{len(results)} rank{'s' if len(results) > 1 else ''}"]
    for rank, own in enumerate(results):
        lines += [
            f"  rank {rank}  {place[:_LONGEST]:<24} {_shown(leaf)}" for place, leaf in leaves(own)
        ]
    text = "\n".join(lines)
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]} … {hashlib.sha256(text.encode(errors='replace')).hexdigest()}"


def are_same(results: Results, other: Results, tolerance: float) -> bool:
    """Whether both print the same."""
    return text_of(results, other, tolerance) == text_of(other, None, tolerance)


def leaves(value: Any, place: str = "") -> list[tuple[str, Any]]:
    """Each array, number, string, and None in `value`, with where it is."""
    if isinstance(value, dict) and value:
        inner = [(f"{place}.{key}".lstrip("."), one) for key, one in value.items()]
    elif isinstance(value, list) and value:
        inner = [(f"{place}[{number}]", one) for number, one in enumerate(value)]
    else:
        return [(place, value)]
    return [leaf for at, one in inner for leaf in leaves(one, at)]


def _shown(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray):
        with np.errstate(all="ignore"):
            numbers = leaf.astype("complex128" if leaf.dtype.kind == "c" else "float64")
            length = float(np.linalg.norm(numbers.ravel()))
        digest = hashlib.sha256(np.ascontiguousarray(leaf).tobytes()).hexdigest()[:8]
        return f"{'×'.join(map(str, leaf.shape))} of length {length:.4g} ({leaf.dtype} {digest})"
    return repr(float(f"{leaf:.8g}") if isinstance(leaf, float) else leaf)[:_LONGEST]


def _rounded(own: Any, key: Any, tolerance: float, shared: float = 0.0) -> Any:
    """`key` where `own` is equal to it up to rounding, and otherwise `own`."""
    if isinstance(key, dict) and isinstance(own, dict):  # what one has more, or less, is told
        arrays = [one for one in key.values() if isinstance(one, np.ndarray)]
        shared = max(map(_largest, arrays), default=0.0)
        both = {name for name in key if name in own}
        if len(both) == len(own) == len(key):
            own = {name: own[name] for name in key}
        return {
            n: _rounded(v, key[n], tolerance, shared) if n in both else v for n, v in own.items()
        }
    if isinstance(key, list) and isinstance(own, list) and len(own) == len(key):
        return [_rounded(a, b, tolerance) for a, b in zip(own, key, strict=True)]
    return key if _is_close(own, key, tolerance, shared) else own


def _is_close(own: Any, key: Any, tolerance: float, shared: float) -> bool:
    """Whether two leaves are equal up to rounding.

    A number or an array may differ by `tolerance` times its largest magnitude. Arrays in one
    dictionary use the largest magnitude among them, `shared`, but at most a thousand times their
    own: where the samples' contributions to one gradient nearly cancel, that gradient is small, but
    its rounding error is not.
    """
    if isinstance(key, np.ndarray):
        if not isinstance(own, np.ndarray) or own.shape != key.shape:
            return False
        if key.dtype.kind not in "fc":
            return bool(np.array_equal(own, key))
        magnitude = _largest(key)
        scale = max(magnitude, min(shared, _MOST_SHARED * magnitude), 1e-30)
        with np.errstate(all="ignore"):
            off = np.abs(own.astype("complex128") - key.astype("complex128"))
            return bool((off <= tolerance * scale).all())  # False for what is not finite
    if isinstance(key, float) and type(own) in (int, float) and abs(own) < 1e300:
        return math.isfinite(own) and abs(own - key) <= tolerance * max(abs(key), 1e-30)
    return type(own) is type(key) and own == key


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0)) if array.dtype.kind in "fc" else 0.0


def observation(results: Results, key: Results, tolerance: float) -> str:
    """A sentence about the first rank that differs from the key; empty if none does."""
    for rank, (own, wanted) in enumerate(zip(results, key, strict=True)):
        # What is equal up to rounding has become the key's own object.
        got, want = dict(leaves(_rounded(own, wanted, tolerance))), dict(leaves(wanted))
        wrong = [place for place in want if place not in got or got[place] is not want[place]]
        if wrong:
            return _about(rank, wrong, got, want)
        if got.keys() - want.keys():
            return f"Rank {rank} returned {sorted(got.keys() - want.keys())[0]}, which is too much."
    return ""


def _about(rank: int, wrong: list[str], got: dict[str, Any], want: dict[str, Any]) -> str:
    place = next((one for one in wrong if str(want[one]) == AS_ASKED), None)
    # Of gradients that were divided by the length of all, a wrong one changes the right ones a bit.
    place = place or max(wrong, key=lambda one: _distance(got.get(one), want[one]))
    mine, key, name = got.get(place), want[place], f"Rank {rank}'s {place}".rstrip()
    if str(key) == AS_ASKED and isinstance(mine, str):
        return f"Rank {rank} {mine[:_LONGEST]}"
    if mine is None and key is not None:
        return f"{name} is None or missing."
    if key is None:
        return f"{name} should be None."
    if not isinstance(key, np.ndarray):
        return f"{name} is {mine!r}; {key!r} is right."[:_LONGEST]
    if not isinstance(mine, np.ndarray) or mine.shape != key.shape:
        shape = "×".join(map(str, getattr(mine, "shape", ()))) or type(mine).__name__
        return f"{name} has the shape {shape}; {'×'.join(map(str, key.shape))} is right."
    return f"{name} {_ratio_and_cosine(mine, key)}"


def _distance(mine: Any, key: Any) -> float:
    """How far two arrays are apart; infinite for what cannot be compared so."""
    if not (isinstance(mine, np.ndarray) and isinstance(key, np.ndarray)):
        return math.inf
    if mine.shape != key.shape or not np.isfinite(mine).all():
        return math.inf
    return float(np.linalg.norm((mine - key).ravel()))


def _ratio_and_cosine(mine: np.ndarray, key: np.ndarray) -> str:
    with np.errstate(all="ignore"):
        a, b = mine.astype("float64").ravel(), key.astype("float64").ravel()
        ratio = float(np.linalg.norm(a) / np.linalg.norm(b))
        cosine = float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    if not math.isfinite(ratio) or not np.isfinite(a).all():
        return "holds numbers that are not finite."
    if ratio == 0:
        return "is all zeros."
    if abs(cosine) > 0.99999:
        sign = "" if cosine > 0 else "-"
        return f"has the right direction, but is {sign}{ratio:.3g} times the right one."
    return f"has another direction (cosine {cosine:.3f}), and {ratio:.3g} times the right length."
