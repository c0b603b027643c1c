"""The certificate: a script's ranks against one process of the same script, measured.

================  =================================================================================
`plan`            which samples each step of each run gets
`program`         starts the runs
`apart`           the same in a process of its own: `certify`
`starts`          one start: its processes and their environments
`forks`           the same processes as forks of one that has loaded torch
`child`           what a process of such a run does first
`guard`           what has been started ends with the certificate, however that ends
`functions`       a script made of three functions
`fixed`           what is off: dropout, clipping, batch statistics, compilation
`files`           what the processes hand to one another: data, and no code
`steps`           the gradients that the optimizer receives, always from the same weights
`state`           weights, buffers, and numbers are put back after a step
`calls`           what the script calls in torch: passes, reductions, Join
`errors`          an error of the doctor's own ends the process
`record`          what is written of a step, and read by the verdict
`premises`        what model and losses got, so that two runs are known to have the same samples
`samples`         what was seen, and who gets what
`loaders`         samples of data loaders
`marks`           samples that come from no loader, marked by the script: `batch`
`tensors`         samples that come from no loader, and that nothing marks
`measure`         two gradients side by side
`evidence`        the steps of both parts side by side, and what speaks against comparing them
`verdict`         three properties, and what follows from them
================  =================================================================================
"""
