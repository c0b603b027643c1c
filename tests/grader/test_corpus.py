"""Right, broken and hostile submissions, graded in one run: what each earns, and what it leaves."""

import csv
import functools
import json
import os
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from grader_corpus import ENTRIES, LOOKS_FOR_THE_ANSWER, TRACE, Entry
from grader_notebooks import FIRST, first_assignment, write

from grader.batch import grade_all
from grader.grade import Result
from grader.merge import read_submission
from grader.report import sentence_of
from grader.sandbox import RankServer
from grader.source import Assignment, read_assignment
from grader.submissions import HandedIn
from labkit.book.tables import table


def processes_of(server: RankServer) -> list[psutil.Process]:
    """What runs below the fork server: nothing, between two checks."""
    zygote = psutil.Process(server.pid)
    # bubblewrap, the fork server, and the fork server in its own process namespace.
    while len(zygote.children()) == 1 and len(zygote.children(recursive=True)) <= 3:
        zygote = zygote.children()[0]
    return zygote.children(recursive=True)


class Graded(NamedTuple):
    results: dict[str, Result]
    folder: Path
    paths: dict[str, HandedIn]


# These end at a limit on time, whatever it is. One check with a third of the limit shows the same.
ENDLESS = ("infinite loop", "infinite loop at import", "process bomb")
# Any check shows what becomes of these, too: they use much, and read no input.
LARGE = (
    *("memory bomb of many processes", "3000 sends and receives", "6000 collectives"),
    *("a result of two million lists", "reads the key from disk"),
)

HIDDEN_OF_EACH = ("each_missing", "each_unused")


def mostly_each(path: Path, hidden: tuple[str, ...] = HIDDEN_OF_EACH) -> Assignment:
    """The assignment with one check of `flat`, which comes last: it executes only the key.

    It fails if what `each` does harms the checks after it. Of the hidden checks of `each`, only
    those that are named in `hidden` remain.
    """
    assignment = read_assignment(path)
    each = [one for one in assignment.checks if one.solutions == ("each",)]
    assert {one.name for one in each if not one.visible} == set(HIDDEN_OF_EACH)
    kept = [one for one in each if one.visible or one.name in hidden]
    flat = next(one for one in assignment.checks if one not in each)
    return replace(assignment, checks=(*kept, flat))


def one_short_check(path: Path) -> Assignment:
    """The assignment with one check, which allows each rank one second of processor time."""
    assignment = read_assignment(path)
    return replace(assignment, checks=(replace(assignment.checks[0], seconds=1),))


def earned(entry: Entry) -> float:
    """The score that `entry` must get here: without the points of the checks that are not run."""
    if entry.name in ENDLESS:
        return entry.score - 5
    return entry.score - 4 * (entry.task == "each")


@pytest.fixture(scope="module")
def graded(walls: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Graded:
    """Every entry of the corpus, graded in six batches into one folder."""
    folder = tmp_path_factory.mktemp("submissions")
    assignment = first_assignment()
    paths = {}
    for number, entry in enumerate(ENTRIES):
        made = entry.make(assignment)
        path = folder / f"{number}.ipynb"
        if isinstance(made, bytes):
            path.write_bytes(made)
        else:
            write(made, path)
        paths[entry.name] = HandedIn(entry.name, path)
    out = tmp_path_factory.mktemp("graded")
    endless = {name: paths[name] for name in ENDLESS}
    # What must cost `each` all its points: one visible and one hidden check show it, the two hidden
    # ones in turn.
    worthless = [
        entry.name
        for entry in ENTRIES
        if entry.task == "each" and entry.score == 5 and entry.name not in (*ENDLESS, *LARGE)
    ]
    of_each = {entry.name: paths[entry.name] for entry in ENTRIES if entry.task == "each"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grader.batch.read_assignment", one_short_check)
        grade_all(endless, FIRST, out, walls, jobs=1)
        patch.setattr("grader.batch.read_assignment", functools.partial(mostly_each, hidden=()))
        grade_all({name: paths[name] for name in LARGE}, FIRST, out, walls, jobs=1)
        for first, hidden in enumerate(HIDDEN_OF_EACH):
            names = worthless[first :: len(HIDDEN_OF_EACH)]
            fewer = functools.partial(mostly_each, hidden=(hidden,))
            patch.setattr("grader.batch.read_assignment", fewer)
            grade_all({name: paths[name] for name in names}, FIRST, out, walls, jobs=2)
        patch.setattr("grader.batch.read_assignment", mostly_each)
        grade_all(of_each, FIRST, out, walls, jobs=1)
    results = grade_all(paths, FIRST, out, walls, jobs=2)  # what has a result is not graded again
    rows = [
        [entry.name, earned(entry), result.score, result.seconds]
        for entry, result in zip(ENTRIES, results, strict=True)
    ]
    print(table(["submission", "expected", "given", "seconds"], rows, digits=1))
    return Graded({result.student: result for result in results}, out, paths)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_submission_earns_what_its_solutions_are_worth(graded, entry):
    result = graded.results[entry.name]
    said = "\n".join([*result.load_errors, *map(sentence_of, result.checks), result.unreadable])
    assert not result.needs_human, result.checks
    assert result.score == earned(entry), said
    assert entry.why in said


def test_a_trick_in_each_does_not_change_the_flat_that_is_read(graded):
    assignment = first_assignment()
    for entry in ENTRIES:
        if entry.task == "each":
            read = read_submission(graded.paths[entry.name].path, assignment)
            assert not read.unreadable
            assert read.solutions["flat"] == assignment.keys()["flat"], entry.name


def test_an_error_that_carries_an_input_shows_it_for_visible_checks_only(graded):
    result = graded.results["exception that carries the input"]
    for check in result.checks:
        if check.score < check.points:
            assert ("[[" in check.sentence) == check.visible


def test_no_submission_leaves_a_file(graded):
    left = [
        Path(folder) / name
        for top in ("/tmp", "/dev/shm", "/var/tmp", os.getcwd())
        for folder, folders, files in os.walk(top)
        for name in [*folders, *files]
        if name == TRACE
    ]
    assert left == []


def test_no_submission_leaves_a_process(graded, server):
    deadline = time.monotonic() + 10
    while len(left := processes_of(server)) > 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_every_student_has_a_page_and_a_file_for_gradescope(graded):
    folders = [path for path in graded.folder.iterdir() if path.is_dir()]
    assert len(folders) == len(ENTRIES)
    for folder in folders:
        report = json.loads((folder / "results.json").read_text())
        assert report["score"] == sum(test["score"] for test in report["tests"])
        assert {test["status"] for test in report["tests"]} <= {"passed", "failed"}
        page = (folder / "feedback.html").read_text()
        assert "<script" not in page


def test_the_course_systems_table_and_the_xml_say_the_same(graded):
    with (graded.folder / "grades.csv").open() as file:
        rows = {row["student"].lstrip("'"): row for row in csv.DictReader(file)}
    suites = ElementTree.parse(graded.folder / "junit.xml").findall("testsuite")
    by_name = {suite.get("name"): suite for suite in suites}
    assert len(rows) == len(by_name) == len(ENTRIES)
    for name, result in graded.results.items():
        assert float(rows[name]["score"]) == result.score
        lost = sum(check.score < check.points for check in result.checks)
        assert int(by_name[name].get("failures")) == lost


def test_who_looks_around_in_the_process_is_noted_on_every_paper(graded):
    [folder] = graded.folder.glob(LOOKS_FOR_THE_ANSWER)
    note = "cell each uses _getframe, f_globals, f_locals: a person should look"
    assert note in (folder / "results.json").read_text().replace("Cell", "cell")
    assert "For a person to look at" in (folder / "feedback.html").read_text()
    with (graded.folder / "grades.csv").open() as file:
        notes = {row["student"]: row["notes"] for row in csv.DictReader(file)}
    assert notes.pop(LOOKS_FOR_THE_ANSWER) == note
    assert notes.pop("correct") == ""


def test_a_name_that_a_spreadsheet_would_calculate_is_text(graded):
    assert '\n"\'=1+1",' in (graded.folder / "grades.csv").read_text()


def test_a_second_run_grades_nothing_again(graded, server, monkeypatch):
    monkeypatch.setattr("grader.batch.grade_many", None)
    again = grade_all(graded.paths, FIRST, graded.folder, server, jobs=2)
    assert {r.student: r.score for r in again} == {n: r.score for n, r in graded.results.items()}
