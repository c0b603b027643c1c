"""Where something happens, also when the whole program is an installed package."""

import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest

from ddp_doctor.facts.places import place, stack

PROGRAM = """
from ddp_doctor.facts.places import expression, place

def train(found):
    found += [place(), expression()]
"""


def test_a_program_in_site_packages_is_named_by_package_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "trainer_of_a_test"
    package.mkdir(parents=True)
    (package / "loop.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(package.parent)
    found: list[str] = []
    loop = import_module("trainer_of_a_test.loop")
    thread = threading.Thread(target=loop.train, args=(found,))  # no frame of this file
    thread.start()
    thread.join()
    loop.train(found)  # from this file: the line is this one, and the operation is the package's
    line = found.pop(2)
    assert line.split(":")[0].endswith("test_places.py")
    assert found.pop() == "expression()"
    assert found == ["trainer_of_a_test/loop.py:5", "expression()"]


def test_the_users_own_line_comes_before_that_of_a_package() -> None:
    assert place().split(":")[0].endswith("test_places.py")


def test_a_stack_begins_here_and_ends_with_the_outermost_frame_or_at_its_limit() -> None:
    here = sys._getframe()
    lines = stack(here, 10**6)
    assert lines[0].endswith(f"in {here.f_code.co_name}")
    assert 3 < len(lines) < 10**6
    assert stack(here, 3)[1:] == lines[1:3]
