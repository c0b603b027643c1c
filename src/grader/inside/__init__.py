"""What runs in a sandbox, and the values that pass between it and the trusted side.

Of the grader only this folder is visible there.
"""
