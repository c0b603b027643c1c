"""What runs inside the sandbox, and nothing else of this project does.

Only this folder is visible there. `wire` is shared with the trusted side, and `large_pages` with
labkit; everything else is started as a program, never imported by the rest of `grader`.
"""
