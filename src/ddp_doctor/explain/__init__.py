"""From facts to findings: pure functions of the merged facts of a run, which `report` prints.

How a finding comes about:

1. `steps.steps_of` takes each optimizer step that all ranks wrote down. `combination` measures what
   the optimizer got, as a multiple of what the ranks' backwards computed (P0).
2. `observed.observed` says in a line each what was measured: gradients, replicas, settings, data,
   random numbers, NaN; and what was not.
3. `rules.examine` asks each rule. A rule is a function of the run and its steps that yields
   findings; its docstring says when what it looks for is right, and `ddp_doctor explain CODE`
   prints it. `findings.CATALOG` has each code's severity, title, and page.
4. What is measured is an error or a warning. What is only recognized is a hint with a `Prediction`:
   the ratio or the shares that a certificate would measure if it is the cause.
5. `answers.with_answers` compares predictions with a certificate, if there is one: a hint becomes a
   measured error, or a contradicted note.

To add one: a code in the catalog, a rule in the file of its family, a test with a journal that it
names and one that it leaves alone.
"""
