"""A project of its own for a script that a test writes."""

import pytest


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script into a project of its own; gives its name."""
    (tmp_path / "labs").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "book").mkdir()
    monkeypatch.chdir(tmp_path / "book")

    def write(text: str) -> str:
        (tmp_path / "labs" / "script.py").write_text(text)
        return "labs/script.py"

    return write
