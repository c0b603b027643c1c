"""The chapters keep to the rules of book/README.md."""

import re
from pathlib import Path

import nbformat
import pytest
import yaml

from labkit.book import predict
from labkit.book.chapters import chapters_of, normalize
from labkit.book.repeated import passage
from labkit.launch.scripts import project_root

ROOT = project_root()
BOOK = ROOT / "book"
CHAPTERS = chapters_of(BOOK)
FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
MARKERS = re.compile(r"nbval[-_](skip|ignore|check|test|raises)", re.IGNORECASE)


def pages() -> list[Path]:
    return [*CHAPTERS, *BOOK.rglob("[!R]*.md")]


def text_of(page: Path) -> str:
    if page.suffix == ".md":
        return page.read_text()
    cells = nbformat.read(page, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def code_cells(chapter: Path) -> list[nbformat.NotebookNode]:
    return [c for c in nbformat.read(chapter, as_version=4).cells if c.cell_type == "code"]


def test_every_chapter_is_in_the_table_of_contents_and_every_entry_exists():
    entries = yaml.safe_load((BOOK / "_toc.yml").read_text())
    names = [
        entries["root"],
        *(chapter["file"] for part in entries["parts"] for chapter in part["chapters"]),
    ]
    assert len(names) == len(set(names))
    assert {p.relative_to(BOOK).with_suffix("").as_posix() for p in pages()} == set(names)


def test_every_old_address_is_free_and_leads_to_a_page_that_exists():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]
    there = {page.relative_to(BOOK).with_suffix("").as_posix() for page in pages()}
    assert not there & set(config["moved_pages"])
    assert set(config["moved_pages"].values()) <= there


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_every_code_cell_is_compared(chapter):
    for number, cell in enumerate(code_cells(chapter)):
        where = f"{chapter.name}, code cell {number}"
        assert cell.execution_count is not None, (
            f"{where} was never run: nbval would not compare it"
        )
        assert not MARKERS.search(cell.source), f"{where} switches its comparison off"
        for tag in cell.metadata.get("tags", []):
            assert not MARKERS.search(tag), f"{where} is tagged {tag}"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_a_visible_cell_has_at_most_25_lines_and_a_program_in_quotes_35(chapter):
    for number, cell in enumerate(code_cells(chapter)):
        lines = len(cell.source.splitlines())
        limit = 35 if re.match(r'[A-Z]+ = """', cell.source) else 25
        folded = FOLDED & set(cell.metadata.get("tags", []))
        assert folded or lines <= limit, f"{chapter.name}, code cell {number}: {lines} lines"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_stored_outputs_are_clean_and_name_no_machine(chapter):
    notebook = nbformat.read(chapter, as_version=4)
    assert notebook == normalize(nbformat.read(chapter, as_version=4)), "run: make update"
    for number, cell in enumerate(code_cells(chapter)):
        for output in cell.outputs:
            data = output.get("data", {})
            text = output.get("text", "") + data.get("text/plain", "") + output.get("evalue", "")
            assert output.output_type != "stream" or output.name == "stdout", (number, text)
            assert not re.search(r"0x[0-9a-f]{6,}|/home/|/root/|/tmp/|\bgloo\b|cuda:\d", text), text


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_every_figure_has_a_text_for_those_who_do_not_see_it(chapter):
    for number, cell in enumerate(code_cells(chapter)):
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert len(alt) > 40, f"{chapter.name}, code cell {number} draws a figure without alt"


@pytest.mark.parametrize(
    "chapter", [c for c in CHAPTERS if c.parent.name != "reference"], ids=lambda p: p.stem
)
def test_every_chapter_has_three_exercises_with_solutions_and_one_to_predict(chapter):
    text = text_of(chapter)
    exercises = set(re.findall(r"```\{exercise\}.*\n:label: (\S+)", text))
    solutions = set(re.findall(r"```\{solution(?:-start)?\} (\S+)", text))
    assert len(exercises) >= 3
    assert exercises == solutions
    assert "Predict before you run" in text


PREDICT = re.compile(r"```\{predict\} (\S+)\n((?::\w+: [^\n]*\n)*)(.*?)\n```", re.DOTALL)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_what_a_reader_predicts_is_what_the_solution_prints(chapter):
    for solution, options, rows in PREDICT.findall(text_of(chapter)):
        given = dict(re.findall(r"(?m)^:(\w+): (.*)$", options))
        assert predict.answers(chapter, solution, rows.splitlines(), given)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_a_stub_fails_its_check_and_the_folded_solution_passes_it(chapter):
    cells = code_cells(chapter)
    starters = [n for n, cell in enumerate(cells) if "starter" in cell.metadata.get("tags", [])]
    assert starters or chapter.parent.name != "build"
    for number in starters:
        later = "\n".join(cell.source for cell in cells[number + 1 :])
        check, *_ = re.findall(r"^check_\w+(?=\()", later, re.M)
        called = [c for c in cells[number + 1 :] if re.search(rf"^{check}\(", c.source, re.M)]
        stub, *_, solution = ("".join(o.get("text", "") for o in c.outputs) for c in called)
        assert stub.startswith("Not yet: "), f"{check}(the stub) prints {stub}"
        assert solution.endswith("Right.\n"), f"{check}(the solution) prints {solution}"


def test_the_front_page_shows_the_digits_that_the_chapter_prints():
    cells = code_cells(BOOK / "puzzles" / "accumulate_vs_ddp.ipynb")
    printed = [output.text for cell in cells for output in cell.outputs if "text" in output]
    (table,) = (text for text in printed if re.match("norm +forum ", text))
    rows = [line.split() for line in table.splitlines()[2:6]]
    front = re.findall(
        r"^\| `(\S+)` \| (\S+) \| (\S+) \| (\S+) \|$", (BOOK / "index.md").read_text(), re.M
    )
    assert [list(row) for row in front] == [
        [name, forum, accumulated, ddp] for name, forum, accumulated, _, ddp in rows
    ]


def test_every_passage_that_a_page_repeats_is_marked_once():
    repeated = [
        found
        for page in pages()
        for found in re.findall(r"```\{passage\} (\S+) (\S+)\n", text_of(page))
    ]
    assert len(repeated) >= 6
    for page, name in repeated:
        assert passage(BOOK / page, name)
