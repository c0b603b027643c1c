"""`make notebook` opens a copy of a chapter in JupyterLab, on loopback, with this Python."""

import re
import sys

import nbformat
import pytest

from labkit.book import notebook
from labkit.book.chapters import chapters_of, find, notebooks_of
from labkit.book.notebook import FIRST, copy_missing, make_plain, place_of_copy
from labkit.launch.scripts import project_root

ROOT = project_root()


def test_a_notebook_is_found_by_its_path_and_name_and_an_unknown_name_gets_the_list():
    for name in ("book/surprises/museum.ipynb", "museum.ipynb", "museum"):
        assert str(find(name, ROOT)) == "book/surprises/museum.ipynb"
    assert str(find("05_five_bugs", ROOT)) == "labs/assignments/05_five_bugs.ipynb"
    with pytest.raises(ValueError, match=r"no notebook opera\. There are:\n  book/"):
        find("opera", ROOT)


def test_copies_are_made_once_and_keep_what_the_reader_wrote(tmp_path):
    beside = ("start/one.ipynb", "start/one.py", "start/one.solutions.py")
    for name in (*(f"book/{name}" for name in beside), "book/reference/glossary.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# ours")
    ours = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("ours")])
    nbformat.write(ours, tmp_path / "book/start/one.ipynb")
    copy_missing(tmp_path)
    folder = tmp_path / "notebooks"
    assert (folder / "reference/glossary.md").exists(), "chapters link to it"
    assert (folder / "start/one.py").exists(), "the chapter imports it"
    assert not (folder / "start/one.solutions.py").exists(), "these answer its exercises"
    (folder / "start/one.ipynb").write_text("the reader's")
    copy_missing(tmp_path)
    assert (folder / "start/one.ipynb").read_text() == "the reader's"
    assert nbformat.read(tmp_path / "book/start/one.ipynb", as_version=4) == ours
    for path in notebooks_of(ROOT):  # what a notebook reads by a relative path is found
        assert len(place_of_copy(path).parts) == len(path.parts)


EXERCISE = """\
(here)=
```{exercise} How many?
:label: ex-many

Count them.
```

```{solution-start} ex-many
:class: dropdown
```
Three."""
AFTER = """\
```{solution-end}
```
See [](../reference/glossary.md) {cite:p}`li2020pytorch`.
{{ gpu_timelines }}"""


def test_a_plain_chapter_folds_its_solution_and_names_what_it_links_to():
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [text(EXERCISE), code("print(3)"), text(AFTER), code("check(4)")]
    chapter = nbformat.v4.new_notebook(cells=cells)
    make_plain(chapter, ROOT / "book/start")
    exercise, solution, after, check = chapter.cells
    assert exercise.source.startswith("**Exercise: How many?**\n\n\nCount them.\n")
    folded = "<details><summary>Solution</summary>\n\nThree.\n\n</details>"
    assert exercise.source.strip().endswith(folded)
    assert solution.metadata.jupyter == {"source_hidden": True, "outputs_hidden": True}
    assert after.source == "See [Glossary](../reference/glossary.md) [li2020pytorch]."
    assert "jupyter" not in check.metadata


def test_no_directive_role_or_link_without_a_text_is_left_in_any_plain_chapter():
    for path in chapters_of(ROOT / "book"):
        chapter = nbformat.read(path, as_version=4)
        make_plain(chapter, path.parent)
        for cell in chapter.cells:
            if cell.cell_type == "markdown":
                ours = r"^(```|:::).*\{|\[\]\(|\{[\w:]+\}`|^\{\{"
                left = re.search(ours, cell.source, re.MULTILINE)
                assert left is None, (path.name, cell.source)
                assert cell.source.count("<details>") == cell.source.count("</details>")


@pytest.mark.parametrize(
    ("given", "opened"),
    [(["--port", "9999"], FIRST), (["museum", "--port", "9999"], "book/surprises/museum.ipynb")],
)
def test_jupyterlab_starts_on_loopback_with_this_python_and_its_own_options(
    given, opened, monkeypatch
):
    started = []
    monkeypatch.setattr(sys, "argv", ["notebook", *given])
    monkeypatch.setattr(notebook, "copy_missing", lambda root: None)
    monkeypatch.setattr(notebook.os, "execve", lambda *arguments: started.append(arguments))
    notebook.main()
    ((python, command, environment),) = started
    assert python == command[0] == sys.executable
    assert environment["JUPYTER_PREFER_ENV_PATH"] == "1"
    assert "--ip=127.0.0.1" in command
    assert f"--LabApp.default_url=/lab/tree/{opened.removeprefix('book/')}" in command
    assert command[-2:] == ["--port", "9999"]
