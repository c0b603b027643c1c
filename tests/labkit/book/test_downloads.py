"""A downloaded chapter says what it needs where that is missing, and runs where it is not."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labkit.book.downloads import add_guards

ADDRESS = "https://github.com/owner/name"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "_sources" / "start" / "one.ipynb"
    path.parent.mkdir(parents=True)
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell("import labkit")]
    nbformat.write(notebook, path)
    return tmp_path


def first_cell(site: Path) -> str:
    notebook = nbformat.read(site / "_sources" / "start" / "one.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert [cell.source for cell in notebook.cells[1:]] == ["import labkit"]
    return notebook.cells[0].source


@pytest.mark.parametrize(
    ("address", "how"),
    [
        ("", "In the folder that this book came in, run: make notebook"),
        (ADDRESS, f"Run: git clone {ADDRESS} && cd name. There, run: make notebook"),
    ],
)
def test_outside_of_the_project_the_first_cell_says_what_is_missing_and_how_to_get_it(
    address, how, site
):
    add_guards(site, address)
    # -I: no PYTHONPATH. -S: no site-packages, and so no editable install of this checkout.
    command = [sys.executable, "-I", "-S", "-c", first_cell(site)]
    done = subprocess.run(command, cwd=site, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: This Python has no labkit and no miniddp. ")
    assert f"{how} CHAPTER=book/start/one.ipynb" in last


def test_in_the_project_the_first_cell_does_nothing(site, capsys):
    add_guards(site, "")
    exec(first_cell(site), {})
    assert capsys.readouterr().out == ""


def test_the_cell_is_there_once_however_often_the_book_is_rendered(site):
    add_guards(site, ADDRESS)
    add_guards(site, "")
    assert "came in" in first_cell(site)


def test_a_book_without_notebooks_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="make html builds them"):
        add_guards(tmp_path, "")
