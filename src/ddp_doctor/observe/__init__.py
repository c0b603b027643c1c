"""Observes the user's process: one file per thing observed; all of them write through `session`.

Facts go from here into journals, and nowhere else: nothing here reads a fact or judges one.
"""
