"""The command line and the notebooks, as an instructor, an author, and a student use them."""

import ast
import csv
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from grader_notebooks import (
    FIRST,
    cell,
    first_assignment,
    small_assignment,
    submission,
    with_checks,
    write,
)
from nbclient import NotebookClient
from nbformat import read
from nbformat.v4 import new_notebook
from processes import all_gone, becomes

from grader import batch
from grader.__main__ import main
from grader.answer_key import AnswerKey, Outcome
from grader.batch import grade_all
from grader.grade import CheckResult, Result, grade_together
from grader.merge import Submission
from grader.sandbox import FORKS, Forks
from grader.source import read_assignment
from grader.submissions import Work
from labkit.launch.kernels import AsyncKernelThroughFiles

COMMAND = [sys.executable, "-m", "grader"]


def passed(student):
    assignment = first_assignment()
    checks = [CheckResult(c.name, c.points, c.points, c.visible) for c in assignment.checks]
    return Result(student, assignment.name, assignment.title, 10, checks, seed=7)


def test_a_source_notebook_runs_from_top_to_bottom(tmp_path):
    """Its checks run the key, and print what nbval will compare."""
    source = read(FIRST, as_version=4)
    chosen = ("tools", "imports", "each", "model_of_the_checks", "each_unused", "wrong_each_zeros")
    cells = [one for one in source.cells if one.id in chosen]
    executed = NotebookClient(
        new_notebook(cells=cells, metadata=source.metadata),
        resources={"metadata": {"path": str(tmp_path)}},
        timeout=600,
        kernel_manager_class=AsyncKernelThroughFiles,
    ).execute()
    [output] = next(one for one in executed.cells if one.id == "each_unused").outputs
    assert output["text"].startswith(("2 ranks", "3 ranks", "4 ranks"))
    assert "of length" in output["text"]


def test_a_failed_release_shows_what_a_student_would_read(tmp_path, capfd):
    notebook = json.loads(small_assignment(tmp_path).read_text())
    key = cell(notebook, "each")
    key["source"] = "".join(key["source"]).replace("exists = torch", "exists = 1 / 0 + torch")
    path = write(notebook, tmp_path / "broken.ipynb")
    assert main(["release", str(path), str(tmp_path / "out"), "--trust"]) == 2
    said = capfd.readouterr().err
    assert "check each_average: the key raised" in said
    assert "in cell each, line" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["grade", "nowhere", "--assignment", str(FIRST), "--out", "o"], "there is no"),
        (["grade", ".", "--assignment", "nowhere.ipynb", "--out", "o"], "nowhere.ipynb"),
        (["grade", ".", "--assignment", str(FIRST), "--out", "o"], "no notebook in ."),
        (["release", str(FIRST), str(FIRST), "one.ipynb"], "do not fit into one.ipynb"),
        (["validate", str(FIRST)], "is not a released assignment"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments, said, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert said in capfd.readouterr().err


def test_without_bubblewrap_nothing_is_run_unless_told_so(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("grader.sandbox._program", lambda: None)
    monkeypatch.setitem(FORKS, False, Forks(trust=False))  # another test may have started that one
    path = write(submission(first_assignment(), {}), tmp_path / "in" / "ada.ipynb")
    command = ["grade", str(path), "--assignment", str(FIRST), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "bubblewrap is not installed, so nothing was run." in capfd.readouterr().err


@pytest.mark.parametrize(("verdict", "score", "code"), [(None, None, 3), (False, 0, 0)])
def test_points_come_from_nbval_alone(verdict, score, code, tmp_path, capfd, monkeypatch):
    """The key returns what is right; where nbval says nothing, a person has to look."""

    def judge_all(expected, printed, stop):  # None: nbval did not start
        found = {} if verdict is None else dict.fromkeys(range(len(printed)), verdict)
        return found, "nbval did not start"

    monkeypatch.setattr("grader.grade.judge", judge_all)
    monkeypatch.setattr("grader.batch.read_assignment", one_check)
    path = write(submission(first_assignment(), first_assignment().keys()), tmp_path / "a.ipynb")
    command = ["grade", str(path), "--assignment", str(FIRST), "--out", str(tmp_path / "out")]
    assert main([*command, "--trust"]) == code
    with (tmp_path / "out" / "grades.csv").open() as file:
        [row] = csv.DictReader(file)
    assert (row["score"], row["needs_human"]) == ("" if score is None else "0", str(code == 3))
    assert ("nbval did not start" in row["reasons"]) == (code == 3)
    printed = capfd.readouterr().out
    assert ("a: needs a person of 2" in printed) == (code == 3)
    assert "In force: each check's time, and no sandbox." in printed


def one_check(path):
    return with_checks(read_assignment(path), "each_average", ranks=(2,))


def test_where_the_grader_fails_at_one_student_the_others_keep_their_points(monkeypatch):
    """Nor does anybody run again where nbval says nothing of what is judged together."""
    ran, own = [], one_check(FIRST)

    def checks(sandbox, check, cells, *_):
        ran.append(cells[-1][1])
        if "broken" in ran[-1]:
            raise RecursionError("such as in a walk through what came back")
        return [Outcome(answer_key.key_results(check)[0])]

    def judges_one(expected, printed, stop):
        return ({0: True} if len(printed) == 1 else {}), "nbval died"

    monkeypatch.setattr("grader.grade.run_check", checks)
    monkeypatch.setattr("grader.grade.judge", judges_one)
    with AnswerKey(own, 1, trust=True) as answer_key:
        sources = {name: own.keys() | {"each": f"# {name}"} for name in ("ada", "broken", "eve")}
        results = grade_together([(k, Submission(v)) for k, v in sources.items()], answer_key)
    assert [one.score for one in results] == [2, 0, 2]
    assert [one.needs_human for one in results] == [False, True, False]
    assert len(ran) == 3


def test_what_is_finished_is_not_graded_again_and_a_changed_file_is(tmp_path, monkeypatch):
    graded = []

    def quick(submissions, answer_key):
        graded.extend(name for name, _ in submissions)
        return [passed(name) for name, _ in submissions]

    monkeypatch.setattr(batch, "grade_together", quick)
    paths = {}
    for name in ("ada", "bob", "eve"):
        path = write(submission(first_assignment(), {}), tmp_path / f"{name}.ipynb")
        paths[name] = Work(name, path)
    grade_all(paths, FIRST, tmp_path / "out", trust=True)
    grade_all(paths, FIRST, tmp_path / "out", trust=True)
    assert sorted(graded) == ["ada", "bob", "eve"]
    write(submission(first_assignment(), {"each": "x = 1"}), paths["bob"].path)
    grade_all(paths, FIRST, tmp_path / "out", trust=True)
    grade_all({"eve": paths["eve"]}, FIRST, tmp_path / "out", trust=True, again=True)
    assert graded[3:] == ["bob", "eve"]
    with (tmp_path / "out" / "grades.csv").open() as file:
        assert [row["student"] for row in csv.DictReader(file)] == ["ada", "bob", "eve"]
    report = json.loads((tmp_path / "out" / "ada" / "results.json").read_text())
    assert report["score"] == 10
    assert {test["visibility"] for test in report["tests"]} == {"visible", "after_published"}
    assert "seed 7" in (tmp_path / "out" / "ada" / "feedback.html").read_text()


def test_two_threads_never_parse_at_once(monkeypatch):
    """CPython 3.11.7 raises a SystemError then, and a good submission is left to a person."""
    parsing, most, real = [], [], ast.parse

    def slowly(source):
        parsing.append(source)
        most.append(len(parsing))
        time.sleep(0.001)
        parsing.pop()
        return real(source)

    with monkeypatch.context() as patched, ThreadPoolExecutor(4) as pool:
        patched.setattr(ast, "parse", slowly)
        list(pool.map(read_assignment, [FIRST] * 8))
    assert max(most) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "source", "begun"),
    [
        (signal.SIGINT, "import time\ntime.sleep(1000)\n", "*/ranks-*"),
        (signal.SIGTERM, first_assignment().stubs()["each"], "*/bench.ipynb"),
    ],
)
def test_ctrl_c_and_sigterm_end_soon_and_leave_no_process_and_no_folder(
    number, source, begun, tmp_path
):
    path = write(submission(first_assignment(), {"each": source}), tmp_path / "in" / "a.ipynb")
    command = [*COMMAND, "grade", str(path), "--assignment", str(FIRST), "--trust"]
    mark, temporary = str(tmp_path), tmp_path / "temporary"
    temporary.mkdir()
    run = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRADER_TEST": mark, "TMPDIR": str(temporary)},
    )
    assert becomes(lambda: list(temporary.glob(begun)) or run.poll() is not None, within=300)
    run.send_signal(number)
    _, said = run.communicate(timeout=300)
    assert run.returncode == 130
    assert "the same command continues" in said
    assert all_gone(mark)
    assert list(temporary.iterdir()) == []
