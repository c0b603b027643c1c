"""The command line, as an instructor and a student use it."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from grader_notebooks import ASSIGNMENTS, FIRST, cell, first_assignment, submission, write

from grader import batch, judge
from grader.bench import Case, Cases
from grader.check import Verdict
from grader.cli import _parser, main
from grader.feedback import write_feedback
from grader.grade import grade, grade_many
from grader.lint import Finding
from grader.merge import Submission
from grader.people import People
from grader.release import write_release
from grader.sandbox import RankServer
from grader.source import read_assignment, source_of
from grader.submissions import HandedIn


@pytest.fixture(scope="module")
def released(tmp_path_factory, server):
    """The release of the first assignment."""
    path = tmp_path_factory.mktemp("released") / "average_gradients.ipynb"
    write_release(first_assignment(), path, server.address)
    return path


@pytest.mark.parametrize("source", sorted(ASSIGNMENTS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_assignment_can_be_released(source, tmp_path, capfd, monkeypatch):
    """Its key earns everything, its stubs nothing, each wrong answer loses its own check only."""
    if source != FIRST:  # one job: each further run of nbval would take another 2 s to start
        monkeypatch.setattr("os.cpu_count", lambda: 1)
    package = tmp_path / "for_students.zip"
    arguments = ["release", str(source), str(tmp_path), "--trust"]
    arguments += ["--package", str(package)] if source == FIRST else []
    assert main(arguments) == 0, capfd.readouterr().out
    printed = capfd.readouterr().out
    assert "NOT " not in printed
    number = 4 + len(read_assignment(source).wrong_answers)
    assert [f"[{n}/{number}] ok " in printed for n in range(1, number + 1)] == [True] * number
    [notebook] = tmp_path.glob("*.ipynb")
    assert f"Released: {notebook}" in printed
    assert package.exists() == (source == FIRST)
    assert ("add --package" in printed) == (source != FIRST)
    # The last line is the next command, and it is one.
    python, *module, last = printed.splitlines()[-1].split(maxsplit=3)
    assert Path(python).samefile(sys.executable)
    assert module == ["-m", "grader"]
    following = _parser().parse_args(last.split())
    assert (following.assignment, following.submissions) == (source, [Path("handed_in")])


def test_a_release_says_what_it_does_before_it_takes_long(tmp_path, monkeypatch, capfd, server):
    """Each line is printed when its trial has ended, and not all of them together."""
    seen = []

    def slow(assignment, server, jobs):
        seen.append(capfd.readouterr().out)
        yield Finding("the key", "loses nothing", "loses nothing")
        seen.append(capfd.readouterr().out)
        yield Finding("the stubs", "0 points", "10 points")

    monkeypatch.setattr("grader.cli.lint", slow)
    assert main(["release", str(FIRST), str(tmp_path), "--trust"]) == 1
    assert "Average the gradients: trying 13 solutions" in seen[0]
    assert seen[1] == "[1/13] ok   the key: loses nothing\n"
    said = capfd.readouterr()
    assert "[2/13] NOT  the stubs: 10 points, should be: 0 points" in said.out
    assert "Not released: 1 of these" in said.err
    assert list(tmp_path.iterdir()) == []


def test_several_notebooks_are_not_released_into_one_file(tmp_path, capfd):
    sources = [str(path) for path in ASSIGNMENTS.glob("*.ipynb")]
    assert main(["release", *sources, str(tmp_path / "all.ipynb")]) == 2
    assert "5 notebooks do not fit into" in capfd.readouterr().err


def test_a_release_is_written_only_after_its_lint_and_says_what_it_tried(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one job, and so one run of nbval
    notebook = json.loads(FIRST.read_text())
    [wrong] = [c for c in notebook["cells"] if c["id"] == "wrong_each_sum"]
    others = [c for c in notebook["cells"] if c["id"].startswith("wrong") and c is not wrong]
    notebook["cells"] = [c for c in notebook["cells"] if c not in others]
    wrong["source"] = "%%wrong_answer\n" + first_assignment().keys()["each"]
    source = write(notebook, tmp_path / "source.ipynb")
    assert main(["release", str(source), str(tmp_path / "out"), "--trust"]) == 1
    printed = capfd.readouterr()
    assert "[1/5] ok   the key: loses nothing" in printed.out
    assert "[2/5] ok   the key with other inputs: loses nothing" in printed.out
    assert "[4/5] ok   the stubs: 0 points" in printed.out
    assert (
        "NOT  sum instead of average: loses nothing, should be: loses each_average" in printed.out
    )
    assert "Not released" in printed.err
    assert not (tmp_path / "out").exists()


def test_a_student_validates_a_notebook_and_reads_what_is_left(released, tmp_path, capfd):
    notebook = json.loads(released.read_text())
    cell(notebook, "each")["source"] = first_assignment().wrong_answers[0].source
    mine = write(notebook, tmp_path / "mine.ipynb")
    assert main(["validate", str(mine)]) == 1
    printed = capfd.readouterr().out
    assert "each_average: not yet. This is the sum over the ranks" in printed
    assert "first difference on rank 0" in printed
    assert "flat_average: not yet. flat is not written yet" in printed
    assert "Visible checks: 0 of 2 (0 points); 7 more points use fresh inputs" in printed


def test_a_solved_notebook_passes_what_is_visible_and_is_promised_no_more(
    released, tmp_path, capfd, monkeypatch
):
    notebook = json.loads(released.read_text())
    for name, key in first_assignment().keys().items():
        cell(notebook, name)["source"] = key
    mine = write(notebook, tmp_path / "mine.ipynb")
    assert main(["validate", str(mine)]) == 0
    assert "Visible checks: 2 of 2 (3 points); 7 more points" in capfd.readouterr().out
    # The cell below each task does the same, on the notebook of the folder that it runs in.
    monkeypatch.chdir(tmp_path)
    for one in notebook["cells"]:
        if "grader.student" in source_of(one):
            exec(source_of(one), {})
    printed = capfd.readouterr().out
    assert "each_average: passed" in printed
    assert "flat_average: passed" in printed


def test_an_empty_release_runs_to_its_end(released, monkeypatch, capfd):
    monkeypatch.chdir(released.parent)
    namespace = {}
    for one in json.loads(released.read_text())["cells"]:
        if one["cell_type"] == "code":
            exec(source_of(one), namespace)
    assert capfd.readouterr().out.count("is not written yet") == 2


def test_grade_takes_folders_and_feedback_writes_the_pages_anew(tmp_path, capfd):
    assignment = first_assignment()
    handed_in = tmp_path / "handed_in"
    write(submission(assignment, assignment.keys()), handed_in / "ada" / "work.ipynb")
    write(submission(assignment, {}), handed_in / "bob" / "work.ipynb")
    out = tmp_path / "graded"
    arguments = ["--assignment", str(FIRST), "--out", str(out), "--trust"]
    assert main(["grade", str(handed_in), *arguments]) == 0
    assert "ada: 10 of 10\nbob: 0 of 10\n" in capfd.readouterr().out
    page = out / "bob" / "feedback.html"
    text = page.read_text()
    page.unlink()
    assert main(["feedback", str(out)]) == 0
    assert page.read_text() == text
    assert "0 of 10 points" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["release", "no_such.ipynb", "out"], "No such file"),
        (["validate", str(FIRST)], "not a released assignment"),
        (["grade", "no_such_folder", "--assignment", str(FIRST), "--out", "out"], "there is no"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments, said, capfd):
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_an_empty_folder_is_said_to_hold_no_notebook(tmp_path, capfd):
    (tmp_path / "handed_in").mkdir()
    folders = [str(tmp_path / "handed_in"), "--assignment", str(FIRST), "--out"]
    assert main(["grade", *folders, str(tmp_path / "out")]) == 2
    assert f"no notebook in {tmp_path / 'handed_in'}; pass notebooks" in capfd.readouterr().err


def test_a_grader_that_fails_says_so_and_gives_no_score(server, tmp_path, capfd):
    gone = RankServer("/tmp/no-such-server", server.isolation, server.pid)
    assignment = first_assignment()
    path = write(submission(assignment, assignment.keys()), tmp_path / "ada.ipynb")
    [result] = batch.grade_all({"ada": HandedIn("ada", path)}, FIRST, tmp_path / "out", gone)
    assert result.needs_human
    assert result.score == 0
    report = json.loads((tmp_path / "out" / "ada" / "results.json").read_text())
    assert "score" not in report
    assert all("score" not in test for test in report["tests"])
    assert '"","",10' in (tmp_path / "out" / "grades.csv").read_text().replace(
        '"average_gradients",', ""
    )
    assert "Not decided" in (tmp_path / "out" / "ada" / "feedback.html").read_text()
    # The next run tries again what needed a person.
    [again] = batch.grade_all({"ada": HandedIn("ada", path)}, FIRST, tmp_path / "out", server)
    assert again.score == 10


def test_one_submission_that_breaks_the_grader_does_not_stop_the_next(
    server, tmp_path, monkeypatch
):
    assignment = first_assignment()
    paths = {
        name: HandedIn(
            name, write(submission(assignment, assignment.keys()), tmp_path / f"{name}.ipynb")
        )
        for name in ("ada", "bob")
    }
    read_submission = batch.read_submission

    def sometimes(path, assignment):
        if path.stem == "ada":
            raise MemoryError
        return read_submission(path, assignment)

    monkeypatch.setattr(batch, "read_submission", sometimes)
    ada, bob = batch.grade_all(paths, FIRST, tmp_path / "out", server, jobs=1)
    assert ada.needs_human
    assert (bob.needs_human, bob.score) == (False, 10)


def _failing(new):
    """As nbval's outcomes would be read if it had passed nothing."""

    def lines(self):
        return [{**line, "passed": False} if line.get("cell") else line for line in new(self)]

    return lines


def test_only_what_nbval_itself_reports_as_passed_earns_points(server, monkeypatch):
    assignment = first_assignment()
    monkeypatch.setattr(judge._Lines, "new", _failing(judge._Lines.new))
    result = grade(Submission(assignment.keys()), "ada", assignment, server)
    assert result.score == 0
    assert all("nbval says False" in check.needs_human for check in result.checks)


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        (["a namespace per rank"] * 6, "bubblewrap, a namespace per rank"),
        (
            ["a namespace per rank"] * 5 + ["none"],
            "bubblewrap, and nothing between the ranks in it",
        ),
    ],
)
def test_a_result_names_the_least_isolation_that_any_check_had(monkeypatch, reports, said):
    assignment = first_assignment()
    names = [check.name for check in assignment.checks]
    verdicts = {
        name: Verdict(name, True, isolation=isolation).as_dict()
        for name, isolation in zip(names, reports, strict=True)
    }
    monkeypatch.setattr("grader.grade.judge", lambda cases, stop: iter([(0, verdicts)]))
    server = RankServer("nowhere", "bubblewrap, a namespace per rank", 0)
    result = grade(Submission(assignment.keys()), "ada", assignment, server)
    assert result.isolation == said
    lost = {name: {"needs_human": "?"} for name in names}
    monkeypatch.setattr("grader.grade.judge", lambda cases, stop: iter([(0, lost)]))
    server = RankServer("nowhere", "none: trusted", 0)
    result = grade(Submission(assignment.keys()), "ada", assignment, server)
    assert result.isolation == "none: trusted"


def test_an_appeal_sees_the_same_inputs(server):
    assignment = first_assignment()
    stubs = Submission(assignment.stubs())
    one, other = grade_many([("ada", stubs), ("bob", stubs)], assignment, server, seed=5)
    assert [c.seed for c in one.checks] == [c.seed for c in other.checks] == list(range(5, 11))


@pytest.mark.parametrize(("lost", "said"), [(0, True), (2, True), (6, False)])
def test_the_seed_for_an_appeal_is_the_runs_even_if_the_first_check_needs_a_person(
    tmp_path, monkeypatch, lost, said
):
    def judged(cases, stop):
        seeds = cases.submissions[0].seeds
        passed = {name: Verdict(name, True, seed=seed).as_dict() for name, seed in seeds.items()}
        yield 0, passed | {name: {"needs_human": "?"} for name in list(seeds)[:lost]}

    monkeypatch.setattr("grader.grade.judge", judged)
    server = RankServer("nowhere", "none: trusted", 0)
    assignment = first_assignment()
    result = grade(Submission(assignment.keys()), "ada", assignment, server, seed=70)
    write_feedback(result, tmp_path)
    page = (tmp_path / "feedback.html").read_text()
    assert ("the inputs were those of seed 70." in page) == said
    assert ("For an appeal" in page) == said


def test_cases_come_back_from_their_file_as_they_were(tmp_path):
    checks = first_assignment().checks
    cases = Cases("address", ("given",), checks, (Case({"a": "x = 1"}, {"a": 1}),))
    cases.write(tmp_path / "cases.json")
    assert Cases.read(tmp_path / "cases.json") == cases


@pytest.mark.parametrize(("option", "value"), [("--jobs", "-1"), ("--jobs", "0"), ("--seed", "-5")])
def test_a_number_that_makes_no_sense_is_refused_in_a_sentence(option, value, capfd):
    with pytest.raises(SystemExit) as stopped:
        main(["grade", "x", "--assignment", str(FIRST), "--out", "o", option, value])
    assert stopped.value.code == 2
    assert f"{option}: {value} is less than" in capfd.readouterr().err


def test_ctrl_c_ends_within_2_s_and_keeps_what_is_finished(tmp_path):
    assignment = first_assignment()
    sleeping = {"each": "import time\ndef average_each(module):\n    time.sleep(1000)\n"}
    write(submission(assignment, assignment.keys()), tmp_path / "in" / "ada.ipynb")
    for name in ("bob", "carol", "dan", "eve"):
        write(submission(assignment, sleeping), tmp_path / "in" / f"{name}.ipynb")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "grader", "grade", str(tmp_path / "in")]
    command += ["--assignment", str(FIRST), "--out", str(out), "--jobs", "1"]
    command += ["--trust"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "ada" / "results.json").exists() and time.monotonic() < deadline:
        assert run.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    pressed = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert time.monotonic() - pressed < 2 * slowness()
    assert run.returncode == 130
    assert "the same command continues" in said
    assert "Traceback" not in said
    with (out / "grades.csv").open() as file:
        assert [row["student"] for row in csv.DictReader(file)] == ["ada"]


def table(path):
    with path.open(encoding="utf-8") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def scores(rows):
    """As numbers; None where a cell is empty."""
    return {name: float(row["score"]) if row["score"] else None for name, row in rows.items()}


def test_roster_overrides_late_days_seed_and_again_from_the_command_line(
    tmp_path, capfd, monkeypatch
):
    assignment = first_assignment()
    fails = assignment.keys() | {"each": "def average_each(module):\n    1 / 0\n"}
    write(submission(assignment, assignment.keys()), tmp_path / "in" / "ada.ipynb")
    write(submission(assignment, fails), tmp_path / "in" / "bob.ipynb")
    (tmp_path / "roster.csv").write_text("student,id\nada,1\nbob,2\neve,3\n")
    overrides = tmp_path / "overrides.csv"
    overrides.write_text(
        "student,check,score,comment,late_days\nada,,,,2\nbob,each_average,1.5,a good idea,\n"
    )
    out = tmp_path / "out"
    command = ["grade", str(tmp_path / "in"), "--assignment", str(FIRST), "--out", str(out)]
    command += ["--trust", "--jobs", "1", "--seed", "7", "--late-penalty", "0.5"]
    command += ["--roster", str(tmp_path / "roster.csv"), "--overrides", str(overrides)]
    assert main(command) == 0
    printed = capfd.readouterr().out
    assert "ada: 9 of 10" in printed
    assert "bob: 6.5 of 10" in printed
    assert "eve: nothing handed in" in printed
    rows = table(out / "grades.csv")
    assert scores(rows) == {"ada": 9, "bob": 6.5, "eve": None}
    assert "2 days late: 1 points less" in rows["ada"]["changed"]
    assert rows["bob"]["comment"] == "a good idea"
    assert rows["eve"]["reasons"] == "nothing was handed in"
    # Gradescope shows hidden checks when the grades are published, and not before.
    report = json.loads((out / "bob" / "results.json").read_text())
    assert {test["name"]: test["visibility"] for test in report["tests"]} == {
        check.name: "visible" if check.visible else "after_published" for check in assignment.checks
    }
    assert report["score"] == 6.5
    # The student reads the failing line and the seed; with that seed the inputs come again.
    page = (out / "bob" / "feedback.html").read_text()
    assert "Your line: 1 / 0" in page
    assert "For an appeal: the inputs were those of seed 7." in page
    assert "a good idea" in page
    # Nothing is graded a second time, unless --again asks for it.
    graded = []
    judged = batch.grade_many
    monkeypatch.setattr(batch, "grade_many", lambda *a, **k: graded.append(1) or judged(*a, **k))
    assert main(command) == 0
    assert not graded
    assert main([*command, "--again"]) == 0
    assert graded
    assert scores(table(out / "grades.csv")) == scores(rows)
    # People may change their minds without another run.
    overrides.write_text("student,check,score,comment,late_days\nada,,4,seen in the lab,\n")
    assert main(["feedback", str(out), "--overrides", str(overrides)]) == 0
    rows = table(out / "grades.csv")
    assert scores(rows) == {"ada": 4, "bob": 5, "eve": None}
    assert "seen in the lab" in (out / "ada" / "feedback.html").read_text()


def test_who_was_graded_in_an_earlier_run_is_not_missing_in_a_later_one(tmp_path, capfd):
    """Nor is a student missing under one form of the name who hands in under another."""
    assignment = first_assignment()
    for name in ("bob", "Carol"):
        write(submission(assignment, assignment.keys()), tmp_path / "in" / f"{name}.ipynb")
    late = tmp_path / "late" / "lovelaceada_LATE_12_678901_average_gradients.ipynb"
    write(submission(assignment, {}), late)
    roster = tmp_path / "roster.csv"
    roster.write_text('student,id\n"Lovelace, Ada",12\nbob,13\ncarol,14\neve,15\n')
    out = tmp_path / "out"
    rest = ["--assignment", str(FIRST), "--out", str(out), "--trust", "--jobs", "1"]
    rest += ["--roster", str(roster)]
    overrides = tmp_path / "overrides.csv"
    overrides.write_text("student,comment,score\nbob,fine,\neve,are you well?,2\nevve,typo,\n")
    assert main(["grade", str(tmp_path / "in"), *rest]) == 0
    assert scores(table(out / "grades.csv")) == {
        "bob": 10,
        "Carol": 10,
        "eve": None,
        "Lovelace, Ada": None,
    }
    capfd.readouterr()
    # Rows of students who are not in this run are no typing errors.
    assert main(["grade", str(late), *rest, "--overrides", str(overrides)]) == 3
    said = capfd.readouterr()
    assert said.out.splitlines() == ["lovelaceada: 0 of 10", "eve: 2 of 10 (nothing handed in)"]
    [error] = [line for line in said.err.splitlines() if line.startswith("grader: ")]
    assert error.startswith(f"grader: {overrides}, line 4: there is no result for student 'evve'")
    rows = table(out / "grades.csv")
    assert scores(rows) == {"bob": 10, "Carol": 10, "eve": 2, "lovelaceada": 0}
    assert "2 of 10 points" in (out / "eve" / "feedback.html").read_text()
    assert rows["eve"]["comment"] == "are you well?"
    assert not (out / "Lovelace, Ada").exists()


def test_that_a_work_is_late_is_noted_once_however_often_it_is_graded(server, tmp_path):
    assignment = first_assignment()
    path = write(submission(assignment, {}), tmp_path / "ada.ipynb")
    ada = HandedIn("ada", path, late=True)
    for _ in range(3):
        [result] = batch.grade_all({"ada": ada}, FIRST, tmp_path / "out", server, jobs=1)
    assert result.notes == ["the course system says that it is late"]


def test_a_grader_that_failed_is_tried_again_at_once_when_nobody_decides_any_more(server, tmp_path):
    gone = RankServer("/tmp/no-such-server", server.isolation, server.pid)
    assignment = first_assignment()
    path = write(submission(assignment, assignment.keys()), tmp_path / "ada.ipynb")
    ada = {"ada": HandedIn("ada", path)}
    overrides = tmp_path / "overrides.csv"
    overrides.write_text("student,score\nada,3\n")
    decided = People.read(overrides, 0).apply
    for _ in range(2):
        [result] = batch.grade_all(ada, FIRST, tmp_path / "out", gone, finish=decided)
        assert (result.score, result.needs_human) == (3, False)
    [result] = batch.grade_all(ada, FIRST, tmp_path / "out", server, finish=People().apply)
    assert (result.score, result.needs_human) == (10, False)


def test_the_exit_code_is_3_where_a_person_has_to_look(tmp_path, monkeypatch, capfd):
    assignment = first_assignment()
    write(submission(assignment, assignment.keys()), tmp_path / "in" / "ada.ipynb")

    def broken(path, assignment):
        raise MemoryError

    monkeypatch.setattr(batch, "read_submission", broken)
    out = tmp_path / "out"
    command = ["grade", str(tmp_path / "in"), "--assignment", str(FIRST), "--out", str(out)]
    assert main([*command, "--trust"]) == 3
    assert "ada: needs a person of 10" in capfd.readouterr().out
    assert (
        "each_average: needs a person: MemoryError" in table(out / "grades.csv")["ada"]["reasons"]
    )


def test_a_c_locale_grades_students_of_any_name(tmp_path):
    """Neither the names of files nor the terminal can hold their letters there."""
    assignment = first_assignment()
    for name in ("Zoë", "山田"):
        write(submission(assignment, {}), tmp_path / "in" / f"{name}.ipynb")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "grader", "grade", str(tmp_path / "in"), "--trust"]
    command += ["--assignment", str(FIRST), "--out", str(out), "--jobs", "1"]
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        command, env={**os.environ, **c_locale}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Zo\\xeb: 0 of 10" in done.stdout
    rows = table(out / "grades.csv")
    assert scores(rows) == {"Zoë": 0, "山田": 0}
    assert len(list(out.glob("*/feedback.html"))) == 2


def slowness() -> float:
    """How much longer than on a quiet machine things take here and now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
