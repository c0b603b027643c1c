"""The certificate: a script's ranks against one process of the same script, measured.

The script runs as ranks, and as one process that is handed the samples of all ranks (`samples`).
No update is kept during the steps of the `plan`, so all start from the same weights. Three
properties compare the gradients that the optimizer gets in them:

- *P1*: the ranks, against one process with all their samples.
- *P2*: another *deal*: the same samples, distributed differently over ranks and micro-batches.
- *P3*: copies of rank 0's batch on every rank, against one process with that batch.

Samples come from a data loader, from a *mark* (the script says what its batch is:
`ddp_doctor.batch`), or from tensors that the script draws, slices, or converts. So it has to be
shown that both got the same ones: these are the *premises*.

Why EQUAL is to be trusted: one process got the same samples (the premises compare the rows that its
models were given, the pairs of output and target in its losses, and the counts that were reduced),
started with the same weights, and computed the same gradient to a thousandth (P1). Dealt
differently over the ranks, they give it again (P2), so it is no accident of the deal. With every
sample twice, one process's gradient stays, so the loss is a mean, and no constant in it hides a
factor. And the ranks stay together in the steps that follow. What of this was not shown is in the
verdict's sentence; what was shown to be otherwise makes it NOT JUDGED.

================  =================================================================================
`plan`            which samples each step of each run gets
`program`         starts the runs, also in a process of its own: `certify`
`starts`          one start: its processes and their environments
`forks`           the same processes as forks of one that has loaded torch
`child`           what a process of such a run does first
`guard`           what has been started ends with the certificate, however that ends
`fixed`           what is off: dropout, clipping, batch statistics, compilation
`files`           what the processes hand to one another: data, and no code
`steps`           the gradients that the optimizer receives, always from the same weights
`state`           weights, buffers, and numbers are put back after a step
`calls`           what the script calls in torch: passes, reductions, Join
`errors`          an error of the doctor's own ends the process
`record`          what is written of a step, and read by the verdict: runs of rounds of steps
`premises`        what model and losses got, so that two runs are known to have the same samples
`samples`         the samples of each rank's first step, and the dealer that says who gets which
`loaders`         samples of data loaders
`marks`           samples that come from no loader, marked by the script: `batch`
`tensors`         samples that come from no loader, and that nothing marks
`measure`         two gradients side by side
`evidence`        the steps of both runs side by side, and what speaks against comparing them
`properties`      the table of properties: each measured, or why it is not judged
`verdict`         the ordered list of verdicts on that table: the first that fits
================  =================================================================================
"""
