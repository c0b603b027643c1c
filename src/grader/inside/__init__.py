"""What runs inside the sandbox, and nothing else of this project does.

Only this folder is visible there. `wire` is shared with the trusted side, and `large_pages` with
labkit. The rest of `grader` imports nothing else from here, but starts it as a program.
"""
