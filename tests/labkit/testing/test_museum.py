"""Every invariant rejects some exhibit, and the chapter's numbers are of the kind on each label.

The chapter itself fails if an exhibit is not rejected, on any rank, by the check on its label.
"""

import re

import nbformat

from labkit.launch import project_root
from labkit.launch.ranks import run_ranks
from labkit.testing import invariants
from labkit.testing.invariants import INVARIANTS, violations
from labkit.testing.museum import exhibits
from labkit.testing.overlap import communication_overlaps_backward

BY_NAME = {exhibit.name: exhibit for exhibit in exhibits()}
ROW = re.compile(r"^(\w+) +(\w+) +(-?\d+\.\d+) +(-?\d+\.\d+) +\d+$", re.MULTILINE)


def test_ratio_and_cosine_of_every_exhibit_are_of_the_kind_that_its_label_says():
    cells = nbformat.read(project_root() / "book/surprises/museum.ipynb", as_version=4).cells
    printed = "\n".join(o.text for c in cells for o in c.get("outputs", []) if "text" in o)
    found = {name: (check, float(r), float(c)) for name, check, r, c in ROW.findall(printed)}
    for name, exhibit in BY_NAME.items():
        if exhibit.bug == "scale":
            _, ratio, cosine = found[name]
            assert cosine == 1
            assert abs(ratio - 1) > 0.1
        elif exhibit.bug == "direction":
            assert found[name][2] < 1 - 1e-4
        else:
            assert name not in found or found[name][0] != "gradients_equal_full_batch"


def test_every_invariant_rejects_some_exhibit():
    labeled = {exhibit.caught_by for exhibit in exhibits()}

    def work():
        ring = BY_NAME["whole_vector_ring"].wrap
        return list(violations(ring, invariants=[invariants.replicas_stay_identical]))

    assert run_ranks(work, 3, device="cpu") == [["replicas_stay_identical"]] * 3
    every = {check.__name__ for check in (*INVARIANTS, communication_overlaps_backward)}
    assert labeled | {"replicas_stay_identical"} == every
