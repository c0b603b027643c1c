"""Observes the user's process: one file per thing observed; all of them write through `session`.

How a fact comes about:

1. `install` gives every file below the process's `Recorder` and `Patches`. A file wraps functions
   of torch with `patches.observe(owner, name, before, after)`, or registers hooks.
2. `session.observing` says whether the current step is looked at: the first six, then a sample. An
   observer checks it (`recorder.on`) before it does anything that costs time.
3. A fact is typed in `facts.types`. `session.write(kind, ...)` writes one at once. What belongs to
   the current optimizer step is put into `recorder.window`; when an optimizer has stepped,
   `recorder.end_window` writes all of it as one `WindowFact`, with hashes and projections of the
   gradients and parameters.
4. An error in an observer ends the observation with one line, never the run (`session.guard`).

Nothing here changes a number, communicates with other ranks, reads a fact, or judges one: the facts
of all ranks meet in `facts.merged`.
"""
