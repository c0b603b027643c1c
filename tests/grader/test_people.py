"""What a person's file changes in results, and what is said of rows that fit none of them."""

import csv

from grader.cli import main
from grader.grade import CheckResult, Result
from grader.people import People
from grader.report import read_results, write_results


def result(*scores, needs=""):
    """Ada's, with 5 points per check; the first check needs a person if `needs` says why."""
    checks = [
        CheckResult(f"c{n}", 5, score, False, "why", needs_human=needs if n == 0 else "")
        for n, score in enumerate(scores)
    ]
    return Result("ada", "a", "A", sum(scores), 5 * len(scores), checks)


def people(tmp_path, *rows):
    table = tmp_path / "o.csv"
    table.write_text("\n".join(["student,check,score,comment,late_days", *rows]) + "\n")
    return People.read(table, per_day=0)


def test_a_row_that_is_removed_leaves_nothing_of_what_it_set(tmp_path):
    ada, untouched = result(0, 5, needs="OSError"), result(0, 5, needs="OSError")
    people(tmp_path, "ada,c0,1.5,,").apply(ada)
    assert (ada.score, ada.needs_human) == (6.5, False)
    people(tmp_path, "ada,,9,well done,1").apply(ada)
    assert (ada.score, ada.needs_human, ada.checks[0].set_to) == (9, False, None)
    people(tmp_path).apply(ada)
    assert ada == untouched
    assert ada.needs_human


def test_of_two_rows_for_one_check_the_last_counts(tmp_path):
    ada = result(0, 5)
    people(tmp_path, "ada,c0,3,,", "ada,c0,5,,").apply(ada)
    assert (ada.score, ada.checks[0].set_to) == (10, 5)
    assert ada.changed == "a person set c0 to 5"


def test_a_score_of_the_whole_counts_whatever_rows_set_checks(tmp_path):
    for rows in (["ada,,4,,", "ada,c0,3,,"], ["ada,c0,3,,", "ada,,4,,"]):
        ada = result(0, 5)
        people(tmp_path, *rows).apply(ada)
        assert ada.score == 4


def test_a_row_of_an_unknown_student_or_check_is_reported_with_its_line(tmp_path, capfd):
    out = tmp_path / "out"
    write_results(result(0, 5), out / "ada", "x")
    people(tmp_path, "ada,c0,1,,", "adaa,c0,1,,", "", ",,,,", "ada,c9,1,,")
    table = tmp_path / "o.csv"
    assert main(["feedback", str(out), "--overrides", str(table)]) == 3
    assert capfd.readouterr().err.splitlines() == [
        f"grader: {table}, line 3: there is no result for student 'adaa'; "
        "use a name or an id from grades.csv",
        f"grader: {table}, line 6: student 'ada' has no check 'c9'; the checks are c0, c1",
    ]
    # What fits is applied all the same, and the student reads nothing of a typing error.
    ada, _ = read_results(out / "ada")
    assert (ada.score, ada.changed) == (6, "a person set c0 to 1")
    with (out / "grades.csv").open() as file:
        assert [float(row["score"]) for row in csv.DictReader(file)] == [6]
    people(tmp_path, "ada,c0,1,,")
    assert main(["feedback", str(out), "--overrides", str(table)]) == 0
    assert capfd.readouterr().err == ""
