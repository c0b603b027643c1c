"""The test set has 37 samples, and each counts once."""


def value(script, run):
    return "samples counted in the accuracy", run.printed(" on "), len(script.split(37, 2))
