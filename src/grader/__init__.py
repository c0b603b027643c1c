"""Course assignments: released as notebooks, handed in as notebooks, graded by nbval.

The files, in the order in which an assignment and then a submission pass through them:

    cli               the commands: release, validate, grade, feedback, preview
    source            read the one source notebook of an assignment
    lint              before a release: try the key, the stubs, and the known wrong answers
    record            what of a check may leave the trusted side: to a rank, to a release
    release           make the students' notebook from the source
    student_package   a release with the wheel and the instructions that students need
    preview           an assignment as a page of the book
    student           what a student can run: the visible checks
    submissions       find the files that were handed in, and their students' names
    notebook_file     read one such file, which may be anything
    magics            take IPython's magics and shell commands out of a cell
    merge             of a notebook that was handed in, only the source of the solutions
    batch             many submissions, in parallel, resumable
    grade             from solutions to points
    judge             run nbval over the bench notebook, which is the instructor's
    outcomes          a pytest plugin: writes down what nbval says of each cell
    bench             in nbval's kernel: print_verdict(0, "name")
    check             one check: draw inputs, run the ranks, compare
    oracle            ask the instructor's half of a check, which runs in the sandbox
    mutants           exhibits of the museum, for checks of a student's own test
    ranks             a group of ranks, seen from the trusted side
    router            carry the ranks' messages, and write down what passed
    sandbox           start the fork server of ranks, in bubblewrap
    people            overrides, comments, and late days from a CSV file
    report            grades.csv, statistics.csv, junit.xml, results.json for Gradescope
    feedback          the page that a student reads
    inside/zygote     in the sandbox: the fork server
    inside/large_pages  the fork server's memory in pages of 2 MiB
    inside/walls      limits and namespaces that each rank gets
    inside/rank       one rank: the student's cells and the check's part for ranks
    inside/link       torch.distributed over the trusted side
    inside/wire       the messages, parsed within bounds
    inside/oracle     the instructor's half of a check: inputs, answers, judgment
    inside/exhibit    implementations for a student's own test, in processes of their own

Everything outside `inside` is trusted. A rank's process belongs to the student: it holds the input
of one rank, has one connection, and sends data. It sends no verdict.
"""
