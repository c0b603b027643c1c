"""The test set has 42 images; a sampler that pads counts some of them twice."""


def value(script, run):
    return "images counted in the accuracy", run.printed(" on "), len(script.split(42, 2))
