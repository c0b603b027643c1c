"""The test set has 42 images, and each counts once."""


def value(script, run):
    return "images counted in the accuracy", run.printed(" on "), len(script.split(42, 2))
