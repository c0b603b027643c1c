"""A split is the same on every rank: no sample is trained on by one rank and held out by another."""


def value(script, run):
    return "samples trained on and held out", run.printed("flowers in both sets: "), 0
