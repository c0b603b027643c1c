"""Course assignments: released as notebooks, handed in as notebooks, graded by nbval.

The rooms, in the order in which a submission passes through them:

    source      the one source notebook of an assignment, read
    release     from it, what students get
    record      of a check what may leave the trusted side: to a rank, to a release
    student     what a student can run: the visible checks
    merge       from a handed-in notebook the solutions' source, and nothing else
    grade       one submission: merge, judge, points
    judge       nbval over the bench notebook, which is the instructor's
    bench       in nbval's kernel: check("name")
    check       one check: draw inputs, run the ranks, compare
    mutants     exhibits of the museum, for checks of a student's own test
    ranks       a group of ranks, seen from the trusted side
    router      carries the ranks' messages, and writes down what it saw
    sandbox     starts the fork server of ranks, in bubblewrap
    inside/     what runs in there: the fork server, the ranks, their link, the check's own half
    lint        the key, the stubs and the known wrong answers, before a release
    batch       many submissions, in parallel, resumable
    report, feedback, cli

Who is trusted: everything outside `inside`. A rank's process belongs to the student whose code it
runs; it holds one rank's input, has one connection, and sends data through it. Where data say who
passed, the student's process did not say it.
"""
