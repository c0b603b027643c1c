"""Course assignments: released as notebooks, handed in as notebooks, graded by nbval.

The files, in the order in which an assignment and then a submission pass through them:

    __main__          the commands: release, validate, grade, preview
    source            read the one source notebook of an assignment
    release           try it, then make the students' notebook, and the package that they get
    preview           an assignment as a page of the book
    student           in a person's notebook: a student's visible checks, an author's %%check
    submissions       find the files that were handed in, and their students' names
    notebook_file     read one such file, which may be anything
    merge             of a notebook that was handed in, only the solutions, as Python
    batch             many submissions, in parallel, resumable
    grade             run a submission's checks; from nbval's verdicts to points and reasons
    answer_key        for one seed: the inputs, and what the key and the wrong answers return
    sandbox           one bubblewrap, and walls of its own for each submission in it
    outputs           what ranks returned, as text for nbval and as an observation for people
    judge             nbval, on a notebook that has stored what the key printed
    report            results.json for Gradescope, grades.csv, feedback.html
    inside            in the bubblewrap: the server, the walls, the ranks, and what they send back

A process in a sandbox belongs to the student. It sends data, and no verdict.
"""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext grader`, in a source notebook: %%common, %%check, and %%wrong_answer."""
    from grader.student import load_ipython_extension as load

    load(shell)
