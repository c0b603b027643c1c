"""Observes the user's process: one file per thing observed; all of them write through `session`.

Two ways lead into a journal. `session.write(kind, ...)` writes a fact at once. What belongs to the
current optimizer step is collected in `recorder.window`, and `end_window` writes all of it.

Facts go from here into journals, and nowhere else: nothing here reads a fact or judges one.
"""
