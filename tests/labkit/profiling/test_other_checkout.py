"""Two versions of a package, imported side by side."""

import sys
from pathlib import Path

import pytest

from labkit.profiling.other_checkout import import_from


def checkout(folder: Path, answer: int) -> Path:
    """A src folder with a package `twin` of two modules, one of which imports inside a function."""
    (folder / "twin" / "room").mkdir(parents=True)
    (folder / "twin" / "__init__.py").write_text("from twin.core import find\n")
    (folder / "twin" / "core.py").write_text(
        "from twin import number\n\n\ndef find():\n"
        "    from twin.room import double\n    return double(number.ANSWER)\n"
    )
    (folder / "twin" / "number.py").write_text(f"ANSWER = {answer}\n")
    (folder / "twin" / "room" / "__init__.py").write_text(
        "from ..number import ANSWER\n\n\n"
        "def double(n):\n    assert n == ANSWER\n    return 2 * n\n"
    )
    return folder


def test_two_versions_run_side_by_side_each_with_its_own_modules(tmp_path, monkeypatch):
    now, before = checkout(tmp_path / "now", 21), checkout(tmp_path / "before", 4)
    monkeypatch.syspath_prepend(str(now))
    first = import_from(before, "twin", "twin_before")
    import twin

    assert (twin.find(), first.find()) == (42, 8)
    assert sys.modules["twin.number"].ANSWER == 21
    assert sys.modules["twin_before.number"].ANSWER == 4
    assert import_from(before, "twin", "twin_before") is first


def test_a_folder_without_the_package_and_a_name_that_is_taken_are_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="has no package twin: name a checkout's src folder"
    ):
        import_from(tmp_path, "twin", "twin_nowhere")
    one, other = checkout(tmp_path / "one", 1), checkout(tmp_path / "other", 2)
    import_from(one, "twin", "twin_taken")
    with pytest.raises(ValueError, match="twin_taken is already imported, from"):
        import_from(other, "twin", "twin_taken")
