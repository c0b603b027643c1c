"""The tools that chapters, labs, and tests use.

==============  ================================================================================
`launch`        start ranks: in a notebook cell, under torchrun, on several nodes
`profiling`     record a step, draw it, slow its network down, predict its time
`testing`       comparisons, invariants, and the museum of broken implementations
`scenarios`     the small models and data sets that several chapters or labs share
`book`          figures, source code, and the execution of chapters
`tables`        text tables, and numbers formatted so that they can be compared
==============  ================================================================================
"""
