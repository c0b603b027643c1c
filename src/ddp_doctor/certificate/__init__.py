"""The certificate: a script's ranks against one process of the same script, measured.

================  =================================================================================
`plan`            which samples each step of each run gets
`program`         starts the runs: `certify`
`child`           what a process of such a run does first
`fixed`           what is off: dropout, clipping, batch statistics, compilation
`steps`           the gradients that the optimizer receives, always from the same weights
`samples`         what was seen, and who gets what
`loaders`         samples of data loaders
`marks`           samples that come from no loader, marked by the script: `batch`
`tensors`         samples that come from no loader, and that nothing marks
`measure`         two gradients side by side
`verdict`         three properties, and what follows from them
================  =================================================================================
"""
